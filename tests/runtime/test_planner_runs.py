"""Whole runs whose engines change their size: planned from round to round, and for a tail."""

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
from rollpacker.job import build
from rollpacker.policy.machine import Machine
from rollpacker.policy.rollout import from_journal
from rollpacker.report.run_folder import load_run

pytestmark = pytest.mark.cluster
ROLLOUT = {"prompts_per_step": 4, "num_generations": 8, "max_completion_length": 40}
NARROW: dict[str, Any] = {
    "devices": {"per_node": 2, "pin": False, "kind": "cpu"},
    "engine": {"kind": "vllm", "max_running": 16, "kv_tokens": 256},
    "trainer": {"kind": "fsdp", "shard": 2},
}
"""An engine of one device has no room for the KV of half a round."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    shop = Workshop(tmp_path_factory.mktemp("planned"), rows=12)
    shop.model = write_wide_model(shop.folder / "wide")
    return shop


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


def fast_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let policies believe that two devices are ten times as fast as one."""
    measured = build.machine_of

    def believed(*args: Any) -> Machine | None:
        machine = measured(*args)
        assert machine is not None
        profiles = {
            size: replace(profile, latency=dict.fromkeys((1, 64), 0.1 / size**3))
            for size, profile in machine.profiles.items()
        }
        return replace(machine, profiles=profiles)

    monkeypatch.setattr(build, "machine_of", believed)


def test_pressure_puts_devices_together_and_a_resume_forgets_none_of_it(
    shop: Workshop, ours: Path
) -> None:
    """The paper's rule: preemptions grow from the first round to the second; then it goes on."""
    asked: dict[str, Any] = settings("paper") | {"checkpoint": {"every": 1, "keep": 9}}
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
    assert [row["bubble/rollout"] < 0.5 for row in metrics(folder)][2:] == [True, True]
    assert checkpoints(folder)[-1] == 4


def test_a_forecast_puts_devices_together(
    shop: Workshop, ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast_pairs(monkeypatch)
    folder, _ = run(shop.config("forecast", steps=4, **settings("forecast", enabled=False)))
    assert decided(folder, "FormEngine")
    assert happened(folder, "EngineFormed")
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
