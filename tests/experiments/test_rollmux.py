"""The published algorithm of RollMux and the policies without sharing, which are an experiment."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments" / "rollmux"))
import published
import run
from baselines import waiting
from cluster_worlds import small
from event_check import check_lines

from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.seat import Seat
from rollpacker.rollmux.placement.permit_order import load_bound
from rollpacker.rollmux.record.event_log import EventLog
from rollpacker.rollmux.record.trace import Philly
from rollpacker.rollmux.scheduler.inventory_file import InventoryFile

seconds = st.floats(1.0, 500.0)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), seconds, seconds), min_size=1, max_size=5))
def test_the_formula_is_the_max_plus_cycle_where_it_holds(
    members: list[tuple[int, float, float]],
) -> None:
    seats = [Seat(str(n), (mask, 1), r, t) for n, (mask, r, t) in enumerate(members)]
    assert published.formula_holds(seats)
    assert published.max_plus_cycle(seats) == pytest.approx(load_bound(seats))


def test_a_triangle_of_gangs_takes_thirty_not_twenty() -> None:
    triangle = [Seat(str(n), (mask, 1), 10.0, 1e-6) for n, mask in enumerate((3, 6, 5))]
    assert load_bound(triangle) == pytest.approx(20.0)
    assert published.cycle(triangle) == pytest.approx(30.0, abs=1e-3)


def test_what_shares_nodes_keeps_all_rules_but_not_all_promises(tmp_path: Path) -> None:
    broken = 0
    for seed in range(4):
        file = tmp_path / "log"
        with file.open("w") as log:
            run.RENTED["rollmux-plain"](small(seed), seed, EventLog(log))
        violations = check_lines(file.read_text().splitlines())
        assert {each.rule for each in violations} <= {"slo"}
        broken += len(violations)
    assert broken > 0


def test_baselines_are_ordered_as_they_must_be() -> None:
    jobs = small(0, jobs=16)
    found = {name: policy(jobs, 0, EventLog(None)) for name, policy in run.RENTED.items()}
    assert found["solo"].cost / found["colocated"].cost == pytest.approx(57.04 / 42.24)
    assert found["gavel"].cost <= found["colocated"].cost + 1e-6
    for name, result in found.items():
        assert len(result.jobs) == len(jobs)
        assert result.lower_bound < result.cost <= found["solo"].cost
        if name in ("solo", "colocated", "gavel", "rollmux"):
            assert result.to_json()["slo_attained"] == 1.0


def test_queues_without_sharing_run_on_named_nodes() -> None:
    machines = [Machine(name=f"{p}-{n}", pool=p) for p in ("rollout", "train") for n in range(2)]
    nodes = InventoryFile(machines=tuple(machines))
    jobs = small(0)
    found = {name: policy(jobs, 0, EventLog(None)) for name, policy in waiting(nodes).items()}
    assert {len(each.jobs) for each in found.values()} == {len(jobs)}
    waits = {name: each.to_json()["wait_s"]["mean"] for name, each in found.items()}
    assert waits["backfill"] <= waits["fifo"]
    assert waits["all-training"] <= waits["colocated"]


def test_the_papers_results_have_rows() -> None:
    found = run.reproduced(1, Philly(jobs=8, days=0.3, cycles="one", mean_hours=1.5))
    assert len(found) == 10
    ours = {each.name: each.ours for each in found}
    ratio = ours["rollmux/rollmux/cost against solo"]
    assert ratio / ours["rollmux/rollmux/cost against co-located"] == pytest.approx(57.04 / 42.24)
