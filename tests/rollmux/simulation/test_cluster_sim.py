"""Whole simulations, judged by the independent checker."""

import json

import numpy as np
import pytest
from cluster_worlds import job, run, small

from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.inventory_file import InventoryFile
from rollpacker.rollmux.simulation.cluster_sim import simulate


@pytest.mark.parametrize("nodes", ["1", "mixed"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_rule_is_kept_and_every_promise(seed: int, nodes: str) -> None:
    jobs = small(seed, nodes=nodes)
    result, violations, _ = run(jobs, Settings())
    assert violations == []
    assert len(result.jobs) == len(jobs)
    assert result.lower_bound < result.cost
    if nodes == "1":
        assert result.cost < simulate(jobs, "solo").cost


def bimodal(seed: int) -> list:
    return small(seed, bimodal=True)


def drifting(seed: int) -> list:
    rng = np.random.default_rng(seed)
    jobs = []
    for n in range(8):
        size = int(rng.integers(30, 80))
        grow = np.linspace(0.3, 1.0, size) * rng.uniform(60, 300)
        jobs.append(
            job(
                f"d{n}",
                list(grow * rng.uniform(0.8, 1.2, size)),
                list(grow * 0.5),
                arrival=float(rng.uniform(0, 4000)),
                slo=float(rng.uniform(1.0, 2.0)),
            )
        )
    return sorted(jobs, key=lambda each: each.arrival_s)


def short_lived(seed: int) -> list:
    """A join every cycle, three iterations each, many without any slack."""
    rng = np.random.default_rng(seed)
    long = job("long", [200.0] * 60, [100.0] * 60, slo=1.4)
    short = [
        job(
            f"s{n}",
            list(rng.uniform(50, 250, 3)),
            list(rng.uniform(30, 120, 3)),
            arrival=300.0 * n,
            slo=1.0 if n % 2 else float(rng.uniform(1.0, 2.5)),
        )
        for n in range(40)
    ]
    return sorted([long, *short], key=lambda each: each.arrival_s)


@pytest.mark.parametrize("trace", [bimodal, drifting, short_lived])
@pytest.mark.parametrize("seed", [0, 1])
def test_promises_hold_on_hard_traces(trace, seed: int) -> None:
    result, violations, _ = run(trace(seed), Settings())
    assert violations == []
    assert max(each.ratio for each in result.jobs) <= 1.0 + 1e-9


@pytest.mark.parametrize("pool", [0, 1])
def test_no_job_is_lost_when_nodes_die(pool: int) -> None:
    failures = [(3000.0 + 2500.0 * n, pool) for n in range(8)]
    jobs = small(2)
    result, violations, text = run(jobs, Settings(), failures)
    assert text.count('"node_down"') >= 6
    assert len(result.jobs) == len(jobs)
    assert {each.rule for each in violations} <= {"slo"}


def test_a_node_that_dies_during_a_move_loses_nobody() -> None:
    """Deaths so dense that some hit a job whose state is being loaded."""
    failures = [(500.0 + 37.0 * n, n % 2) for n in range(300)]
    jobs = small(3)
    result, violations, _ = run(jobs, Settings(), failures)
    assert len(result.jobs) == len(jobs)
    assert {each.rule for each in violations} <= {"slo"}


def test_a_lying_specification_harms_only_its_group() -> None:
    """Worst cases ten times too short."""
    jobs = small(1)
    liar = job("liar", [800.0] * 30, [500.0] * 30, slack=0.1, slo=1.9)
    _, honest, _ = run(jobs, Settings())
    _, violations, text = run([liar, *jobs], Settings())
    hurt = {each.what.split()[0] for each in violations} - {each.what.split()[0] for each in honest}
    assert {each.rule for each in violations} <= {"slo"}
    assert hurt <= companions(text, "liar") | {"liar"}


def companions(text: str, name: str) -> set[str]:
    groups: dict[int, set[str]] = {}
    for line in text.splitlines()[1:]:
        event = json.loads(line)
        if event["kind"] in ("place", "move", "evict"):
            groups.setdefault(event["group"], set()).add(event["job"])
    return set().union(*(group for group in groups.values() if name in group))


def test_alone_every_job_takes_its_own_time_and_its_bubble_is_the_other_phase() -> None:
    jobs = small(0)
    result = simulate(jobs, "solo")
    found = result.to_json()
    dollars = sum(each.solo_s for each in jobs) / 3600.0 * (14.8 + 42.24)
    assert result.cost == pytest.approx(dollars)
    assert found["slowdown"]["mean"] == pytest.approx(1.0)
    assert found["bubble"]["rollout"] + found["bubble"]["train"] == pytest.approx(1.0)


def test_alone_on_few_nodes_jobs_wait_for_each_other() -> None:
    jobs = small(0, jobs=4)
    machines = [Machine(name=f"{pool}-0", pool=pool) for pool in ("rollout", "train")]
    result = simulate(jobs, "solo", nodes=InventoryFile(machines=tuple(machines)))
    ends = sorted((each.ended, each.slowdown) for each in result.jobs)
    assert result.meter.peak == [1, 1]
    assert ends[0][1] == pytest.approx(1.0)
    assert ends[-1][1] > 1.0
