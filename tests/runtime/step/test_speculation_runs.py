"""Whole jobs that decode ahead: the same samples and weights, fewer steps, a true journal."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime_jobs import Workshop, checkpoints, kept_samples, metrics, run, weights_digest

from rollpacker.cli.simulate.rehearse import Encoder, rehearsed
from rollpacker.core import journal
from rollpacker.core.types import PromptId
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.step.responses import DraftSources

# Cold responses of a random model repeat themselves.
COLD = {
    "rollout__temperature": 0.2,
    "rollout__max_completion_length": 120,
    "checkpoint": {"every": 1, "keep": 9},
    "deterministic": True,
    "devices__per_node": 2,
}
shop = Workshop.fixture(rows=8)


def total(folder: Path, name: str) -> float:
    return sum(row[name] for row in metrics(folder))


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["event"] for line in map(json.loads, lines) if "event" in line]


def test_samples_and_weights_are_the_same(shop: Workshop) -> None:
    plain, _ = run(shop.config("plain", **COLD, rollout__speculation__mode="off"))
    ahead, _ = run(shop.config("ahead", **COLD))
    assert kept_samples(ahead) == kept_samples(plain)
    last = f"checkpoint-{checkpoints(plain)[-1]}"
    assert weights_digest(ahead / last) == weights_digest(plain / last)
    assert total(ahead, "speculation/accepted") > 0
    # How many fewer goes by what a row was measured to cost on this machine.
    assert total(ahead, "engine/steps") < total(plain, "engine/steps")
    assert total(plain, "speculation/drafted") == 0
    assert total(plain, "engine/generated_tokens") == total(ahead, "engine/generated_tokens")
    for row in metrics(ahead):
        assert row["speculation/accepted"] <= row["speculation/drafted"]
    told = [
        decision
        for line in (ahead / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        for decision in json.loads(line).get("decisions", ())
        if decision["kind"] == "Speculate"
    ]
    assert told
    timed = [line for line in events(ahead) if line["kind"] == "DecodeTimed"]
    assert len(timed) == len(metrics(ahead))
    assert all(rows > 0 and seconds > 0.0 for rows, seconds in timed[-1]["rows"])
    assert not any(line["kind"] == "DecodeTimed" for line in events(plain))
    reports = [(folder / "report.html").read_text(encoding="utf-8") for folder in (ahead, plain)]
    assert ["Decoded ahead" in report for report in reports] == [True, False]
    assert journal.replay(ahead / "journal.jsonl", from_journal).differences == []
    found, same = [
        rehearsed(folder, Encoder(folder, None, print), print) for folder in (plain, ahead)
    ]
    assert found is not None
    assert found.cases[0].tokens > 1.2
    assert same == found


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["race", pytest.param("off", marks=pytest.mark.slow)])
def test_nothing_is_drafted_where_responses_race_nor_without_any_mode(
    shop: Workshop, mode: str
) -> None:
    folder, _ = run(shop.config(mode, mode, **(COLD | {"devices__per_node": 1})))
    for row in metrics(folder):
        if mode == "off" or row["tail/round_kind"] == "short":
            assert row["speculation/drafted"] == 0


def test_hints_are_those_of_the_last_visit_and_bounded() -> None:
    texts = {PromptId(name): np.arange(10, dtype=np.int32) for name in "abc"}
    hints = DraftSources(kept=20)
    for prompt, text in texts.items():
        hints.begin()
        hints.finished(prompt, text)
        assert hints.siblings(prompt) == (text,)
        assert hints.earlier(prompt) == ()
    hints.begin()
    assert hints.siblings(PromptId("c")) == ()
    assert [bool(hints.earlier(prompt)) for prompt in texts] == [False, True, True]
    hints.finished(PromptId("b"), texts[PromptId("a")])
    hints.begin()
    assert hints.earlier(PromptId("b"))[0] is texts[PromptId("a")]
