"""Whole runs whose engines are vLLM: the samples and the weights of a run with ``mini``."""

from pathlib import Path

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
from test_shared_nodes import FSDP, QUIET, SEPARATE, WarmNodes

from rollpacker import job
from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

pytestmark = pytest.mark.cluster
TWO = {"devices": {"per_node": 2, "pin": False, "kind": "cpu"}, "epochs": 1}
shop = Workshop.fixture(rows=12, model=write_wide_model)


def first(folder: Path) -> list[tuple]:
    """What the first step kept: later weights may differ in the last bits."""
    return [row for row in kept_samples(folder) if row[0] == 0]


@pytest.mark.parametrize("mode", [pytest.param("off", marks=pytest.mark.slow), "exact"])
def test_a_run_samples_and_learns_what_it_does_with_mini(shop: Workshop, mode: str) -> None:
    ours, _ = run(shop.config(f"mini-{mode}", mode, **TWO))
    theirs, _ = run(shop.config(f"vllm-{mode}", mode, engine={"kind": "vllm"}, **TWO))
    assert first(theirs) == first(ours)
    for one, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert other["num_tokens"] == pytest.approx(one["num_tokens"], rel=0.05)
        assert other["tail/kept_vs_true_len"] == one["tail/kept_vs_true_len"] == 1.0
        # What was sampled is what is trained: the trainer finds the engine's own probabilities.
        assert other["trained_tokens/abs_logprob_difference"] < 1e-4


@pytest.mark.parametrize("mode", ["race", pytest.param("auto", marks=pytest.mark.slow)])
def test_every_prompt_is_trained_once_an_epoch(shop: Workshop, mode: str) -> None:
    folder, _ = run(shop.config(f"vllm-{mode}", mode, engine={"kind": "vllm"}, **TWO))
    assert set(times_trained(folder).values()) == {1}


def test_decoding_ahead_changes_no_sample(shop: Workshop) -> None:
    """Cold responses of a random model repeat themselves."""
    cold = {
        "rollout__temperature": 0.2,
        "rollout__max_completion_length": 120,
        "devices": {"per_node": 1, "pin": False, "kind": "cpu"},
        "engine": {"kind": "vllm"},
        "epochs": 2,
    }
    plain, _ = run(shop.config("plain", "exact", **cold, rollout__speculation__mode="off"))
    ahead, _ = run(shop.config("ahead", "exact", **cold))
    assert kept_samples(ahead) == kept_samples(plain)
    losses = [[row["loss"] for row in metrics(folder)] for folder in (plain, ahead)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    drafted, steps, rows = (
        [sum(row[name] for row in metrics(folder)) for folder in (plain, ahead)]
        for name in ("speculation/drafted", "engine/steps", "engine/generated_tokens")
    )
    assert drafted[0] == 0 < drafted[1]
    assert steps[1] < steps[0]
    assert rows[0] == rows[1]
    assert journal.replay(ahead / "journal.jsonl", from_journal).differences == []


def test_adapters_are_merged_for_it(shop: Workshop) -> None:
    model = {"path": str(shop.model), "lora_rank": 4}
    settings = {"model": model, "epochs": 1}
    ours, _ = run(shop.config("mini-lora", **settings))
    theirs, _ = run(shop.config("vllm-lora", engine={"kind": "vllm"}, **settings))
    assert first(theirs) == first(ours)


def test_it_leaves_its_devices_and_comes_back_with_the_newest_weights(shop: Workshop) -> None:
    settings = {"devices": SEPARATE, "trainer": FSDP, "train__learning_rate": 0.01, "epochs": 1}
    config = shop.config("warm", engine={"kind": "vllm"}, **settings)
    folder = job.train(config, progress=QUIET, phases=WarmNodes())
    assert set(times_trained(folder).values()) == {1}
    found = metrics(folder)
    assert len(found) > 1
    assert all(each["trained_tokens/abs_logprob_difference"] < 1e-4 for each in found)


def test_a_run_may_change_its_engine_when_it_goes_on(shop: Workshop) -> None:
    begun = {"steps": 2, "checkpoint": {"every": 1}}
    folder, _ = run(shop.config("changes", **begun))
    run(shop.config("changes", **begun | {"steps": 4}, engine={"kind": "vllm"}), resume=True)
    assert [m["step"] for m in metrics(folder)] == [0, 1, 2, 3]
    assert checkpoints(folder)[-1] == 4
