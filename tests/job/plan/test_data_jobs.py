"""Settings of the data in real runs, and what a run says of data that it can do little with."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from runtime_jobs import Workshop, run, times_trained, write_model

from rollpacker import config
from rollpacker.data.held_out import hold_out
from rollpacker.data.load import load_rows
from rollpacker.job.ask.assess import assess
from rollpacker.job.plan.checks import check
from rollpacker.job.plan.problems import load_data
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.model.loading import read_card

shop = Workshop.fixture()


@pytest.fixture(scope="module")
def rows(shop: Workshop) -> Path:
    """Twelve complete rows and one without an answer, in two files."""
    lines = [json.dumps({"prompt": f"{i:04d}", "answer": "1"}) + "\n" for i in range(12)]
    lines.append(json.dumps({"prompt": "9999", "answer": None}) + "\n")
    (shop.folder / "part-0.jsonl").write_text("".join(lines[:7]))
    (shop.folder / "part-1.jsonl.gz").write_bytes(gzip.compress("".join(lines[7:]).encode()))
    return shop.folder


def test_a_run_on_parts_of_files(shop: Workshop, rows: Path) -> None:
    """Patterns, a row that is skipped, held-out rows, too few rows for a step, a model whose
    context is what cuts responses off; and the same once more when it is resumed."""
    model = write_model(shop.folder / "narrow", context=9)
    changes: dict[str, Any] = {
        "model__path": str(model),
        "data__path": [str(rows / "part-*.jsonl"), str(rows / "part-1.jsonl.gz")],
        "data__missing": "skip",
        "eval": {"fraction": 0.3},
        "rollout__prompts_per_step": 20,
        "rollout__max_completion_length": 5,
        "devices__per_node": 1,
    }
    folder, said = run(shop.config("parts", epochs=1, **changes))
    tree = shop.config("parts", **changes)
    training, held_out = hold_out(load_rows(tree.data).rows, 0.3, tree.seed)
    assert len(training) + len(held_out) == 12
    assert f"1 incomplete rows skipped, first {rows / 'part-1.jsonl.gz'}, row 5" in said
    assert f", {len(held_out)} of 12 rows held out (eval.fraction)" in said
    count = len(training)
    assert (
        f"rollout.prompts_per_step=20 is more than the {count} prompts: each step trains on at "
        f"most {count}, and is a whole epoch"
    ) in said
    assert "cut off at 5 tokens, all that the longest prompt leaves of the model's context" in said
    assert "raise 'rollout.max_completion_length'" not in said
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["before"].keys() == summary["after"].keys() != set()

    folder, said = run(shop.config("parts", epochs=2, **changes), resume=True)
    assert f", {len(held_out)} of 12 rows held out (eval.fraction)" in said
    assert times_trained(folder) == {row.id: 2 for row in training}

    result = assess(tree, str(folder / "checkpoint-2"), None, Progress())
    assert result["problems"] == len(held_out)
    after = json.loads((folder / "summary.json").read_text())["after"]
    assert result["accuracy"] == after["eval/sampled_accuracy"]


@pytest.mark.parametrize(("excluded", "said"), [(False, "3 of its 5"), (True, None)])
def test_problems_that_are_measured_and_trained_on_are_counted(
    shop: Workshop, rows: Path, excluded: bool, said: str | None
) -> None:
    held = shop.folder / "held.jsonl"
    held.write_text("".join(f'{{"prompt": " {i:04d}", "answer": "1"}}\n' for i in range(9, 14)))
    data = {"path": str(rows / "part-*"), "missing": "skip"}
    if excluded:
        data["exclude"] = str(held)
    config = shop.config("measured", data=data, eval={"data": {"path": str(held)}})
    shown = io.StringIO()
    load_data(config, read_card(config.model), Progress(Console(file=shown, width=200)))
    warning = f"WARNING eval.data: {said} prompts are trained on too: data.exclude"
    assert (warning in shown.getvalue()) == bool(said)
    assert ("trained on too" in shown.getvalue()) == bool(said)


KINDS = ("grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo")


@pytest.mark.parametrize("kind", KINDS)
def test_one_response_teaches_nothing_where_it_is_compared(shop: Workshop, kind: str) -> None:
    one = shop.config("one", rollout__num_generations=1, train__algorithm={"kind": kind})
    with pytest.raises(ValueError, match=r"rollout\.num_generations=1 trains nothing") as caught:
        check(one)
    assert f"train.algorithm.kind={kind} compares" in str(caught.value)
    check(shop.config("two", rollout__num_generations=2, train__algorithm={"kind": kind}))


def test_evaluation_needs_one_source_of_problems(shop: Workshop) -> None:
    for eval_, said in (
        ({"every": 1}, "name some in eval.data, hold some of the training data out"),
        ({"fraction": 0.1, "data": {"path": "x"}}, "eval.data and eval.fraction exclude"),
        ({"fraction": 1.0}, "'eval.fraction'"),
    ):
        with pytest.raises(config.ConfigError) as caught:
            shop.config("bad", eval=eval_)
        assert said in str(caught.value)
