"""Whole simulations, judged by the independent checker."""

import json

import numpy as np
import pytest
from cluster_worlds import job, run, small

from rollpacker.rollmux.model.settings import PLAIN, Settings
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import Philly, TraceJob
from rollpacker.rollmux.simulation.policies import POLICIES, Run
from rollpacker.rollmux.simulation.reproduce import rollmux_rows
from rollpacker.rollmux.simulation.result import SimulationResult


def simulated(policy: str, jobs: list[TraceJob]) -> SimulationResult:
    return POLICIES[policy](Run(jobs, 0, EventLog(None), None))


@pytest.mark.parametrize("nodes", ["1", "mixed"])
@pytest.mark.parametrize("permits", ["earliest_deadline", "round_robin"])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_rule_is_kept_and_every_promise(seed: int, permits: str, nodes: str) -> None:
    jobs = small(seed, nodes=nodes)
    result, violations, _ = run(jobs, Settings(permits=permits))
    assert violations == []
    assert len(result.jobs) == len(jobs)
    assert result.lower_bound < result.cost
    if (nodes, permits) == ("1", "earliest_deadline"):
        assert result.cost < simulated("solo", jobs).cost


def test_the_published_algorithm_keeps_all_rules_but_not_all_promises() -> None:
    broken = 0
    for seed in range(4):
        _, violations, _ = run(small(seed), PLAIN)
        assert {each.rule for each in violations} <= {"slo"}
        broken += len(violations)
    assert broken > 0


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
@pytest.mark.parametrize("settings", [Settings(), PLAIN], ids=["ours", "plain"])
def test_no_job_is_lost_when_nodes_die(settings: Settings, pool: int) -> None:
    failures = [(3000.0 + 2500.0 * n, pool) for n in range(8)]
    jobs = small(2)
    result, violations, text = run(jobs, settings, failures)
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
    _, honest, _ = run(jobs, PLAIN)
    _, violations, text = run([liar, *jobs], PLAIN)
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


def test_baselines_are_ordered_as_they_must_be() -> None:
    jobs = small(0, jobs=16)
    alone = simulated("solo", jobs)
    together = simulated("colocated", jobs)
    level = simulated("gavel", jobs)
    assert alone.cost / together.cost == pytest.approx(57.04 / 42.24)
    assert level.cost <= together.cost + 1e-6
    for result in (alone, together, level):
        assert result.to_json()["slo_attained"] == 1.0
        assert result.cost > result.lower_bound
    chance = simulated("random", jobs)
    idle = simulated("greedy", jobs)
    for result in (chance, idle):
        assert len(result.jobs) == len(jobs)
        assert result.cost < alone.cost


def test_the_solo_bubble_is_the_other_phase() -> None:
    jobs = small(0)
    bubble = simulated("solo", jobs).to_json()["bubble"]
    assert bubble["rollout"] + bubble["train"] == pytest.approx(1.0)


def test_the_papers_results_have_rows() -> None:
    found = rollmux_rows(1, Philly(jobs=8, days=0.3, cycles="one", mean_hours=1.5))
    assert len(found) == 10
    assert all(each.ours is not None and each.paper is not None for each in found)
    by_name = {each.name: each.ours or 0.0 for each in found}
    ratio = by_name["rollmux/rollmux/cost against solo"]
    assert ratio / by_name["rollmux/rollmux/cost against co-located"] == pytest.approx(
        57.04 / 42.24
    )
