"""Whole runs whose engines and replicas have devices of their own."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from runtime_jobs import Workshop, checkpoints, kept_samples, metrics, run, times_trained

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.report.reading.run_folder import load_run

pytestmark = pytest.mark.wide

CPU = {"pin": False, "kind": "cpu"}
ONE = CPU | {"per_node": 1}
TWO_AND_ONE = CPU | {"per_node": 3, "layout": "separate", "training": 1}
ONE_AND_TWO = CPU | {"per_node": 3, "layout": "separate", "training": 2}
OFF, AUTO = (pytest.param(mode, marks=pytest.mark.slow) for mode in ("off", "auto"))
shop = Workshop.fixture(rows=12)


@pytest.fixture(scope="module")
def together(shop: Workshop) -> Callable[[str], Path]:
    """The run of a mode on one device."""
    return cache(lambda mode: run(shop.config(f"one-{mode}", mode, devices=ONE, epochs=1))[0])


@pytest.fixture(scope="module")
def apart(shop: Workshop) -> Callable[[str], Path]:
    """The same on separate devices."""
    changes = {"devices": TWO_AND_ONE, "epochs": 1}
    return cache(lambda mode: run(shop.config(f"apart-{mode}", mode, **changes))[0])


def first(folder: Path) -> list[tuple]:
    """What the first step kept: streamed gradients, and so later weights, may differ in the last
    bits."""
    return [row for row in kept_samples(folder) if row[0] == 0]


def steps(folder: Path) -> list[list[str]]:
    """Kinds of the events and decisions of each step, in order."""
    found: list[list[str]] = []
    for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "event" not in entry:
            continue
        if entry["event"]["kind"] == "StepStarted":
            found.append([])
        if found:
            found[-1] += [each["kind"] for each in (entry["event"], *entry["decisions"])]
    return found


@pytest.mark.parametrize("mode", [OFF, "exact", "race", AUTO])
def test_every_prompt_is_trained_once(apart: Any, mode: str) -> None:
    folder = apart(mode)
    assert set(times_trained(folder).values()) == {1}
    # A race may keep a step that has nothing to learn from.
    learnt = [row for row in metrics(folder) if "trained_tokens/abs_logprob_difference" in row]
    assert len(learnt) >= (1 if mode == "race" else len(metrics(folder)))
    for row in learnt:
        assert row["trained_tokens/abs_logprob_difference"] < 1e-4
    found = journal.replay(folder / "journal.jsonl", from_journal)
    assert found.events > 0
    assert not found.differences


@pytest.mark.parametrize("mode", [OFF, "exact"])
def test_it_samples_and_learns_what_colocated_engines_do(
    together: Any, apart: Any, mode: str
) -> None:
    ours, theirs = together(mode), apart(mode)
    assert first(theirs) == first(ours)
    for one, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)
        assert other["tail/kept_vs_true_len"] == 1.0


def test_a_race_starts_what_it_does_when_colocated(together: Any, apart: Any) -> None:
    """Which of them come first is up to the machine; what each of them says is not."""

    def said(folder: Path) -> dict[tuple[str, int], int]:
        rows = load_run(folder).samples.filter(pl.col("step") == 0, pl.col("state") == "kept")
        return {(p, i): n for p, i, n in rows.select("prompt", "sample_index", "tokens").rows()}

    one, other = said(together("race")), said(apart("race"))
    both = one.keys() & other.keys()
    assert len(both) > len(one) / 2
    assert all(one[key] == other[key] for key in both)


@pytest.mark.parametrize("mode", ["exact", "race"])
def test_gradients_begin_before_the_rollout_ends(apart: Any, mode: str) -> None:
    """In every step; where responses race, a step's groups may all be whole at its end."""
    early = [
        step.index("AccumulateGradients") < step.index("FinishRollout")
        for step in steps(apart(mode))
    ]
    assert any(early) if mode == "race" else all(early)


def test_the_report_has_rows_for_both(apart: Any) -> None:
    loaded = load_run(apart("exact"))
    names = {loaded.place(worker).name for worker in loaded.tasks["worker"]}
    assert names == {"replica 0"}
    assert {loaded.place(w).name for w in loaded.samples["worker"]} == {"engine 0", "engine 1"}


def test_adapters_are_merged_for_the_engines(shop: Workshop) -> None:
    model = {"path": str(shop.model), "lora_rank": 4}
    ours, _ = run(shop.config("lora-together", "off", model=model, devices=ONE, steps=2))
    theirs, _ = run(shop.config("lora-apart", "off", model=model, devices=TWO_AND_ONE, steps=2))
    assert kept_samples(theirs) == kept_samples(ours)
    for one, other in zip(metrics(ours), metrics(theirs), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-5)


def test_a_replica_may_span_the_devices_that_train(shop: Workshop, together: Any) -> None:
    settings = {"devices": ONE_AND_TWO, "trainer": {"kind": "fsdp"}, "epochs": 1}
    folder, _ = run(shop.config("spread", **settings))
    ours = together("exact")
    assert first(folder) == first(ours)
    for one, other in zip(metrics(ours)[:2], metrics(folder)[:2], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=1e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-2)
    lines = pl.read_ndjson(folder / "workers.jsonl")
    assert lines.select("worker", "role", "devices", "engine_devices").unique().rows() == [
        (0, "replica", 2, 1)
    ]


def test_a_run_may_change_its_layout_when_it_goes_on(shop: Workshop, together: Any) -> None:
    settings: dict[str, Any] = {"checkpoint": {"every": 1, "keep": 9}, "epochs": 1}
    for until, devices in ((1, ONE), (2, TWO_AND_ONE), (3, ONE)):
        config = shop.config("changes", "off", **settings, devices=devices, steps=until)
        folder, _ = run(config, resume=until > 1)
    assert checkpoints(folder)[-1] == 3
    assert [m["step"] for m in metrics(folder)] == [0, 1, 2]
    assert kept_samples(folder) == kept_samples(together("off"))


VLLM, FSDP = {"kind": "vllm", "tensor_parallel": 2}, {"kind": "fsdp", "shard": 1}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"devices": TWO_AND_ONE | {"training": 3}}, r"^devices\.training=3 leaves none of 3"),
        ({"devices": ONE | {"training": 1}}, r"devices\.training: .* all devices train"),
        ({"devices": ONE | {"layout": "separate"}}, r"separate needs devices\.training"),
        (
            {"devices": CPU | {"per_node": 3}, "engine": VLLM},
            r"^engine\.tensor_parallel=2: 3 devices that decode do not divide",
        ),
        (
            {"devices": CPU | {"per_node": 2}, "engine": VLLM, "trainer": FSDP},
            r"^engine\.tensor_parallel=2: a replica of 1 devices holds no whole engines of 2",
        ),
        (
            {"devices": ONE_AND_TWO, "trainer": FSDP | {"shard": 3}},
            r"^trainer\.shard=3: 2 devices do not divide",
        ),
        ({"rollout__planner": "paper"}, r"^rollout\.planner=paper is for engines that can span"),
        (
            {"rollout__planner": "paper", "engine": {"kind": "vllm"}},
            r"^rollout\.planner=paper has no choice, as engines of 2 do not divide 1 devices",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    shop: Workshop, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        run(shop.config("refused", **changes))
    assert len(str(refused.value).splitlines()) == 1
