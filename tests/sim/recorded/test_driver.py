"""Workers that leave the driver no core: what it takes from them, and how that is found again."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_scripts import scripts
from scripted_job import Journal, Script, ScriptedWorkload
from test_fit_costs import made_run

from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.sim.costs.costs import CurveCosts, DriverCosts
from rollpacker.sim.costs.hardware import MeasuredDevice
from rollpacker.sim.recorded import fit_costs, rerun
from rollpacker.sim.workload.workload import SimulatedRequest
from rollpacker.sim.world.decoder import Decoder
from rollpacker.sim.world.world import World

DRIVER = {"cores": 2, "ended_s": 4e-3, "graded_s": 6e-3}


@given(cores=st.integers(1, 64), busy=st.integers(0, 64), cpu_s=st.floats(0.0, 10.0))
def test_no_work_is_lost_or_made(cores: int, busy: int, cpu_s: float) -> None:
    delay_s = DriverCosts(cores=cores, ended_s=0.0, graded_s=0.0).delay_s(busy, cpu_s)
    if busy < cores:
        assert delay_s == 0.0  # one core is free for it
    else:
        assert delay_s * cores == pytest.approx(cpu_s)


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_known_costs_of_the_driver_come_back(tmp_path: Path, mode: str) -> None:
    run = made_run(tmp_path, mode, driver=DRIVER)
    found = fit_costs.calibrate(run)
    assert found.driver is not None
    assert found.driver.cores == 2
    handled = found.driver.ended_s
    if mode == "exact":  # most responses are graded soon after they end
        handled += found.driver.graded_s
    assert handled == pytest.approx(1e-2, rel=0.05)


def test_costs_with_a_driver_predict_steps_that_were_held_back(tmp_path: Path) -> None:
    found = rerun.held_back(made_run(tmp_path, "exact", driver=DRIVER))
    assert found.accuracy_mean > 0.97
    assert found.total > 0.98


def decoder() -> Decoder:
    """Two sequences of 100 and 200 tokens, a tenth of a second each token."""
    device = MeasuredDevice(latency={1: 0.1, 8: 0.1}, kv_tokens=10**6, prefill_token_s=0.0)
    made = Decoder(CurveCosts(device), max_running=8)
    for attempt, tokens in enumerate((100, 200)):
        made.submit(0.0, SimulatedRequest(attempt, "p", 1, tokens))
    return made


@given(at=st.floats(0.0, 9.9), seconds=st.floats(0.0, 5.0))
def test_what_is_put_off_comes_later_and_is_the_same(at: float, seconds: float) -> None:
    late = decoder()
    assert late.next_event(0.0) == pytest.approx(10.0)
    late.put_off(at, seconds)
    first = late.next_event(at)
    assert first == pytest.approx(10.0 + seconds)
    assert first is not None
    assert late.advance(first) == [(0, 100)]
    last = late.next_event(first)
    assert last == pytest.approx(20.0 + seconds)
    assert last is not None
    assert late.advance(last) == [(1, 200)]
    assert late.generated_tokens == 300


def simulated(script: Script, driver: DriverCosts | None) -> list[tuple]:
    journal = Journal()
    workload = ScriptedWorkload(script)
    costs = replace(script.costs(), driver=driver)
    policy = RolloutPolicy(script.settings())
    world = World(policy, workload, costs, record=journal.record)
    for step in range(script.steps):
        if not sum(workload.source.remaining().values()) + policy.queue:
            workload.source.next_epoch()
        world.run_step(step)
    return journal.lines


@pytest.mark.hypothesis
@given(scripts())
def test_a_driver_that_costs_nothing_changes_nothing(script: Script) -> None:
    free = DriverCosts(cores=1, ended_s=0.0, graded_s=0.0)
    assert simulated(script, free) == simulated(script, None)


@pytest.mark.hypothesis
@given(scripts(), st.integers(1, 3))
def test_steps_end_whatever_the_driver_takes(script: Script, cores: int) -> None:
    lines = simulated(script, DriverCosts(cores=cores, ended_s=0.013, graded_s=0.029))
    times = [now for now, _, _ in lines]
    assert times == sorted(times)
