"""A whole job in each mode: what is trained, what is left behind, what a replay says."""

import gc
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_groups,
    kept_samples,
    metrics,
    run,
    table,
    times_trained,
    write_rows,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

ROWS = 11
FILES = {
    "config.yaml",
    "journal.jsonl",
    "metrics.jsonl",
    "report.html",
    "samples",
    "summary.json",
    "tensorboard",
    "timeline.json",
    "workers.jsonl",
}
shop = Workshop.fixture(rows=ROWS)


def logged(shop: Workshop, name: str) -> list[dict[str, Any]]:
    log = str(shop.folder / f"{name}.log")
    return [{"function": f"{shop.rewards}:logged", "options": {"log": log}}]


def first_graded(shop: Workshop, name: str, count: int, skip: int = 0) -> list[Any]:
    """Prompt and token ids of the first responses that were graded."""
    lines = (shop.folder / f"{name}.log").read_text(encoding="utf-8").splitlines()
    return sorted(json.loads(line) for line in lines[skip : skip + count])


@pytest.fixture(scope="module")
def exact(shop: Workshop) -> tuple[Path, str]:
    held_out = {"path": str(write_rows(shop.folder / "held_out.jsonl", 3))}
    config = shop.config(
        "exact",
        devices__per_node=2,
        rewards=logged(shop, "exact"),
        checkpoint__every=2,
        eval={"data": held_out, "every": 3},
    )
    return run(config)


def test_every_prompt_is_trained_once_an_epoch(exact: tuple[Path, str]) -> None:
    groups = kept_groups(exact[0])
    assert set(groups.values()) == {3}
    everything = {f"p{i}" for i in range(ROWS)}
    for steps in (range(3), range(3, 6)):
        assert Counter(p for s, p in groups if s in steps) == Counter(everything)
    assert [sum(step == s for s, _ in groups) for step in range(6)] == [4, 4, 3, 4, 4, 3]


def test_every_token_is_sampled_by_the_weights_of_its_step(exact: tuple[Path, str]) -> None:
    rows = table(exact[0])
    assert rows["weights_version"].to_list() == rows["step"].to_list()
    assert {row["policy_version_max_lag"] for row in metrics(exact[0])} == {0}


def test_exact_throws_nothing_away(exact: tuple[Path, str]) -> None:
    assert set(table(exact[0])["state"]) == {"kept"}
    assert set(table(exact[0])["worker"]) == {0, 1}


def test_files_of_a_run(exact: tuple[Path, str]) -> None:
    folder, said = exact
    assert {path.name for path in folder.iterdir()} >= FILES
    assert "canonical: prompt <- prompt, answer <- answer" in said
    assert [row["step"] for row in metrics(folder)] == list(range(6))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"], summary["prompts_trained"]) == (6, 2, 2 * ROWS)
    assert summary["tail"]["kept_vs_true_len"] == 1.0
    assert summary["kept_tokens"] == table(folder)["tokens"].sum()
    assert summary["decoded_tokens"] == summary["kept_tokens"]
    assert summary["cores"]["workers"] == 2


def test_evaluations(exact: tuple[Path, str]) -> None:
    """Before, after, and every third step; held-out samples are in no table."""
    summary = json.loads((exact[0] / "summary.json").read_text())
    names = {"eval/sampled_accuracy", "eval/greedy_accuracy", "eval/problems"}
    assert names <= set(summary["before"])
    assert names <= set(summary["after"])
    evaluated = [row["step"] for row in metrics(exact[0]) if "eval/sampled_accuracy" in row]
    assert evaluated == [2, 5]
    assert summary["before"]["eval/problems"] == 3


def test_checkpoints_load_as_models(exact: tuple[Path, str]) -> None:
    folder = exact[0]
    assert checkpoints(folder) == [4, 6]
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-6")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "checkpoint-6")
    assert tokenizer.decode(tokenizer("012")["input_ids"]) == "012"
    assert model.num_parameters() > 0


def test_the_journal_replays(exact: tuple[Path, str]) -> None:
    replay = journal.replay(exact[0] / "journal.jsonl", from_journal)
    assert replay.events > 6 * 12
    assert replay.differences == []


@pytest.fixture(scope="module")
def off(shop: Workshop) -> Path:
    """One step."""
    return run(shop.config("off", "off", rewards=logged(shop, "off"), steps=1))[0]


def test_off_and_exact_keep_the_same_tokens(
    exact: tuple[Path, str], off: Path, shop: Workshop
) -> None:
    """In the first step; later, gradients are summed in another order."""
    assert checkpoints(off) == [1]
    assert first_graded(shop, "off", 12) == first_graded(shop, "exact", 12, skip=2 * 3)


def test_race_keeps_whole_groups(shop: Workshop) -> None:
    folder, _ = run(shop.config("race", "race", devices__per_node=1))
    groups = kept_groups(folder)
    assert set(groups.values()) == {3}
    assert times_trained(folder) == Counter({f"p{i}": 2 for i in range(ROWS)})
    kinds = [row["tail/round_kind"] for row in metrics(folder)]
    assert {"short", "long"} <= set(kinds)
    rows = table(folder)
    assert "aborted" in set(rows["state"])
    assert rows["weights_version"].to_list() == rows["step"].to_list()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tail"]["long_rounds"] == kinds.count("long")
    assert summary["tail"]["deferred"] > 0
    aborted = table(folder, "aborted")["tokens"].sum()
    assert summary["tail"]["aborted_tokens"] == aborted
    assert summary["decoded_tokens"] == table(folder)["tokens"].sum()
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


@pytest.mark.parametrize("scaling", [pytest.param("fixed", marks=pytest.mark.slow), "paper"])
def test_half_of_the_workers_is_freed_as_the_rule_says(
    scaling: str, off: Path, shop: Workshop
) -> None:
    """And the samples are the same as without it."""
    changes = {"rollout__streaming": {"scaling": scaling, "group_tokens": 1}, "steps": 3}
    folder, _ = run(shop.config(scaling, devices__per_node=2, **changes))
    first = [sample for sample in kept_samples(folder) if sample[0] == 0]
    assert first == kept_samples(off)
    moves = decisions_by_step(folder, "MigrateAttempts")
    assert moves
    assert all(len({move["source"] for move in step}) == 1 for step in moves.values())
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


def decisions_by_step(folder: Path, kind: str) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    step = -1
    for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()[1:]:
        entry = json.loads(line)
        step = entry["event"].get("step", step)
        for decision in entry["decisions"]:
            if decision["kind"] == kind:
                found.setdefault(step, []).append(decision)
    return found


def test_what_a_job_froze_it_thaws_and_nothing_else(shop: Workshop, exact: Any) -> None:
    """Tests begin with all that was imported frozen, and ``exact`` has left it so."""
    assert gc.get_freeze_count() > 100_000
    gc.unfreeze()
    try:
        run(shop.config("thawed", epochs=1, steps=1))
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
