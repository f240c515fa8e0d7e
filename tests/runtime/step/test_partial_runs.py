"""Mode partial: who loses a round keeps its tokens and goes on in the next step."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_samples,
    metrics,
    run,
    table,
    times_trained,
    weights_digest,
)

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.polytrace.formats.files import Reading
from rollpacker.polytrace.formats.ours.journal import read as read_journal
from rollpacker.polytrace.formats.ours.runs import read as read_table
from rollpacker.report.run_report import write_report
from rollpacker.runtime.attempts.carried import FILE

ROWS, EPOCHS, MOST = 21, 2, 2
FIXED = {
    "deterministic": True,
    "samples": {"token_ids": True},
    "checkpoint": {"every": 1, "keep": 40},
    "rollout__tail_batching": {"mode": "partial", "eta_prompts": 3.0, "max_staleness": MOST},
}
shop = Workshop.fixture(rows=ROWS)


@pytest.fixture(scope="module")
def whole(shop: Workshop) -> Path:
    """A run of two epochs that keeps every checkpoint."""
    folder, _ = run(shop.config("whole", "partial", **FIXED))
    return folder


def replays(folder: Path) -> bool:
    return journal.replay(folder / "journal.jsonl", from_journal).differences == []


def test_every_prompt_is_trained_on_once_an_epoch(whole: Path) -> None:
    assert set(times_trained(whole).values()) == {EPOCHS}
    assert len(times_trained(whole)) == ROWS
    assert replays(whole)


def test_a_response_goes_on_from_the_tokens_that_it_had(whole: Path) -> None:
    rows = table(whole).sort("attempt")
    carried, kept = (
        rows.filter(pl.col("state") == "carried"),
        rows.filter(pl.col("state") == "kept"),
    )
    assert 0 < kept["stale_tokens"].sum() < kept["tokens"].sum()
    ends = 0
    for before in carried.filter(pl.col("tokens") > 0).iter_rows(named=True):
        after = next(_later(rows, before))
        assert after["completion_ids"][: before["tokens"]] == before["completion_ids"]
        assert after["stale_tokens"] == before["tokens"]
        assert after["step"] == before["step"] + 1
        assert after["weights_version"] == before["weights_version"]
        if before["finish_reason"] != "abort":  # it is whole: nothing is sampled, nor graded again
            assert after["tokens"] == before["tokens"]
            assert before["reward"] in (None, after["reward"])
            ends += 1
    assert ends


def _later(rows: pl.DataFrame, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same sample of the prompt in later steps."""
    same = (pl.col("prompt") == before["prompt"]) & (
        pl.col("sample_index") == before["sample_index"]
    )
    return rows.filter(same & (pl.col("step") > before["step"])).iter_rows(named=True)


def test_nothing_is_older_than_it_may_be_and_metrics_say_how_old(whole: Path) -> None:
    kept = table(whole, "kept").with_columns(age=pl.col("step") - pl.col("weights_version"))
    assert kept["age"].max() == MOST
    lines = metrics(whole)
    assert all(line["tail/aborted_tokens"] == 0 for line in lines)
    assert max(line["tail/long_queue"] for line in lines) > 1
    for line, (_, rows) in zip(lines, kept.group_by("step", maintain_order=True), strict=True):
        stale = rows["stale_tokens"].sum() / rows["tokens"].sum()
        assert line["partial/stale_tokens"] == pytest.approx(stale)
        assert line["policy_version_max_lag"] == rows["age"].max()
        worst = line["training/off_policy/trajectory_staleness_worst/mean"]
        assert worst == pytest.approx(rows["age"].mean())
        assert line["training/off_policy/trajectory_staleness/max"] <= rows["age"].max()


def test_a_run_goes_on_with_what_was_carried(whole: Path, shop: Workshop) -> None:
    steps = [s for s in checkpoints(whole) if (whole / f"checkpoint-{s}" / FILE).exists()]
    assert steps, "no checkpoint had anything to carry"
    copy = whole.parent / "again"
    shutil.copytree(whole, copy, ignore=shutil.ignore_patterns(".lock", "summary.json"))
    for later in checkpoints(copy):
        if later > steps[0]:
            shutil.rmtree(copy / f"checkpoint-{later}")
    run(shop.config("again", "partial", **FIXED), resume=True)
    assert kept_samples(copy) == kept_samples(whole)
    last = f"checkpoint-{checkpoints(whole)[-1]}"
    assert weights_digest(copy / last) == weights_digest(whole / last)
    assert replays(copy)


@pytest.mark.parametrize("read", [read_table, read_journal])
def test_traces_have_each_response_once(whole: Path, read: Any) -> None:
    """With all its tokens, from the table and from the journal."""
    path = whole if read is read_table else whole / "journal.jsonl"
    found = read([path], Reading(task="t", note=print)).samples
    kept = table(whole, "kept")
    assert set(found["state"]) == {"kept"}
    assert len(found) == len(kept) == ROWS * EPOCHS * 3
    assert found["response_tokens"].sum() == kept["tokens"].sum()


def test_a_report_shows_it(whole: Path) -> None:
    assert "Stale tokens" in write_report(whole).read_text(encoding="utf-8")


@pytest.mark.wide
@pytest.mark.parametrize("stale", ["mask", "fresh", "truncate"])
def test_other_answers_to_stale_tokens(whole: Path, shop: Workshop, stale: str) -> None:
    tail = {**FIXED["rollout__tail_batching"]}  # type: ignore[dict-item]
    other = {"train__sampler_correction": {"kind": "truncate"}}
    if stale != "truncate":
        tail["stale_tokens"], other = stale, {}
    keys = {**FIXED, "rollout__tail_batching": tail, "checkpoint": {"every": 0}, "steps": 5}
    folder, _ = run(shop.config(stale, "partial", **keys, **other))
    mine, theirs = metrics(folder), metrics(whole)
    first = next(n for n, line in enumerate(theirs) if line["partial/stale_tokens"])
    # Of the first step all is the same, of the next all but what is learned from stale tokens.
    for name, last in (("grad_norm", first), ("completions/mean_length", first + 1)):
        assert [m[name] for m in mine[:last]] == [t[name] for t in theirs[:last]]
    norms = [[line["grad_norm"] for line in lines[first:5]] for lines in (mine, theirs)]
    assert norms[0] != norms[1]
    assert replays(folder)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"rollout__top_p": 0.9}, "set rollout.top_p to 1 and rollout.top_k to 0"),
        ({"train__algorithm": {"kind": "rloo"}}, "and clips many responses"),
        ({"devices__per_node": 2}, "set devices.per_node to 1"),
        (
            {"rollout__tail_batching": {"mode": "partial", "long_round_steps": 2}},
            "has no long rounds",
        ),
        (
            {"environment": {"kind": "python", "path": "e.py:E"}},
            "a response that goes on in a later step",
        ),
        ({"grading__asynchronous": False}, "a race needs each reward when its response ends"),
    ],
)
def test_what_cannot_work_is_refused(shop: Workshop, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run(shop.config("refused", "partial", deterministic=True, **keys))
