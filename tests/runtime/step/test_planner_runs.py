"""Whole runs whose engines change their size: planned from round to round, and for a tail."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_samples,
    metrics,
    run,
    times_trained,
    write_wide_model,
)
from spanning_runs import decided, happened

from rollpacker.core import journal
from rollpacker.job.plan import build
from rollpacker.policy.engines.hardware import Hardware
from rollpacker.policy.rollout import from_journal
from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.reading.run_folder import load_run

pytestmark = pytest.mark.cluster
ROLLOUT = {"prompts_per_step": 4, "num_generations": 8, "max_completion_length": 40}
NARROW: dict[str, Any] = {
    "devices": {"per_node": 2, "pin": False, "kind": "cpu"},
    "engine": {"kind": "vllm", "max_running": 16, "kv_tokens": 256},
    "trainer": {"kind": "fsdp", "shard": 2},
}
"""An engine of one device has no room for the KV of half a round."""
shop = Workshop.fixture(rows=12, model=write_wide_model)


@pytest.fixture(scope="module")
def ours(shop: Workshop) -> Path:
    """With ``mini``, on one device."""
    return run(shop.config("ours", epochs=2, steps=4, rollout=ROLLOUT))[0]


def settings(planner: str, **streaming: Any) -> dict[str, Any]:
    rollout: Mapping[str, Any] = {"planner": planner, "streaming": streaming}
    return {"epochs": 2, "rollout": ROLLOUT | rollout, **NARROW}


def check(ours: Path, folder: Path) -> None:
    """It sampled what one device does, and its journal replays."""
    one, other = ([row for row in kept_samples(each) if row[0] == 0] for each in (ours, folder))
    assert other == one
    for row in metrics(folder):
        assert row["trained_tokens/abs_logprob_difference"] < 1e-4
        assert row["tail/kept_vs_true_len"] == 1.0
    found = journal.replay(folder / "journal.jsonl", from_journal)
    assert found.events > 0
    assert not found.differences


def idle_shares(folder: Path) -> dict[int, dict[int, float]]:
    """Of the rollout of each step, by device: in which it did nothing."""
    shares: dict[int, dict[int, float]] = {}
    for row in Gantt(load_run(folder)).bubbles.iter_rows(named=True):
        share = row["rollout_idle_s"] / row["rollout_s"]
        shares.setdefault(row["step"], {})[row["worker"]] = share
    return shares


def fast_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies believe that two devices are ten times as fast as one."""
    measured = build.machine_of

    def believed(*args: Any) -> Hardware | None:
        machine = measured(*args)
        assert machine is not None
        profiles = {
            size: replace(profile, latency=dict.fromkeys((1, 64), 0.1 / size**3))
            for size, profile in machine.profiles.items()
        }
        return replace(machine, profiles=profiles)

    monkeypatch.setattr(build, "machine_of", believed)


@pytest.mark.slow
def test_pressure_puts_devices_together_and_a_resume_forgets_none_of_it(
    shop: Workshop, ours: Path
) -> None:
    """The paper's rule: preemptions grow from the first round to the second; then it goes on."""
    # Without streaming no tail moves, which would depend on how long this machine takes.
    still = settings("paper", enabled=False)
    asked: dict[str, Any] = still | {"checkpoint": {"every": 1, "keep": 9}}
    run(shop.config("paper", steps=2, **asked))
    folder, _ = run(shop.config("paper", steps=4, **asked), resume=True)
    first, second, *_ = happened(folder, "RoundMeasured")
    assert second["preemptions"] > first["preemptions"]
    formed = decided(folder, "FormEngine")
    assert formed[0] == (2, {"kind": "FormEngine", "engine": 0, "members": [0, 1]})
    assert len(happened(folder, "EngineFormed")) == len(formed)
    check(ours, folder)
    samples = load_run(folder).samples
    assert set(samples.filter(samples["step"] == 1)["worker"]) == {0, 1}
    assert set(samples.filter(samples["step"] == 2)["worker"]) == {0}
    shares = idle_shares(folder)
    for row in metrics(folder)[2:]:
        # Both are idle when their engine is: a device that was not counted would be so all along.
        share = pytest.approx(row["bubble/rollout"], abs=1e-6)
        assert shares[row["step"]] == {0: share, 1: share}
    assert checkpoints(folder)[-1] == 4


def test_both_sizes_are_measured_and_a_round_is_of_one(shop: Workshop, ours: Path) -> None:
    """Whatever it decides on this machine: both sizes have costs, and each round is of one."""
    folder, _ = run(shop.config("measured", steps=4, **settings("paper", enabled=False)))
    with (folder / "journal.jsonl").open(encoding="utf-8") as lines:
        machine = json.loads(next(lines))["meta"]["settings"]["machine"]
    costs = [profile["latency"] for _, profile in sorted(machine["profiles"].items())]
    assert len(costs) == 2
    assert all(seconds > 0 for each in costs for seconds in each.values())
    assert [each["step"] for each in happened(folder, "RoundMeasured")] == [0, 1, 2, 3]
    together = {step for step, _ in decided(folder, "FormEngine")}
    for step in range(4):
        used = {each["engine"] for at, each in decided(folder, "StartAttempt") if at == step}
        assert used == ({0} if step in together else {0, 1})
    check(ours, folder)


def test_a_tail_goes_on_in_one_larger_engine(
    shop: Workshop, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_pairs(monkeypatch)
    asked: dict[str, Any] = settings("paper", scaling="consolidate") | {"epochs": 1}
    folder, _ = run(shop.config("tail", **asked))
    moved = [move for _, move in decided(folder, "MigrateAttempts")]
    assert {move["target"] for move in moved} == {0}
    assert happened(folder, "AttemptMigrated")
    assert happened(folder, "EngineFormed")
    check(ours, folder)
    assert set(times_trained(folder).values()) == {1}
    stays = load_run(folder).formed
    assert stays.select("lead", "worker").unique().rows() == [(0, 1)]
