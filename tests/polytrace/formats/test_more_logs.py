"""Logs whose rewards, groups or copies are easily mistaken: each is read as it was written."""

import json
from pathlib import Path
from typing import Any

import pytest
from trace_lines import dump

from rollpacker.polytrace import formats
from rollpacker.polytrace.formats import said
from rollpacker.polytrace.schema import TraceError

CASES = Path(__file__).parents[1] / "cases_more"
EXPECTED = json.loads((CASES / "expected.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", EXPECTED)
def test_each_case_is_read_as_it_was_written(name: str) -> None:
    expected = dict(EXPECTED[name])
    if "error" in expected:
        with pytest.raises(TraceError) as error:
            formats.read(CASES / name)
        assert expected["error"] in str(error.value)
        assert "\n" not in str(error.value)
        return
    whole = formats.read(CASES / name)
    frame = whole.of_training().samples
    found: dict[str, Any] = {
        "rows": frame.height,
        "tokens": frame["response_tokens"].sum(),
        "steps": sorted(frame["step"].unique()),
        "groups": frame.group_by("step", "prompt", maintain_order=True).len()["len"].to_list(),
        "rewards": frame["reward"].to_list()[: len(expected.get("rewards", ()))],
        "cut": frame["truncated"].sum(),
        "aborted": frame.filter(state="aborted").height,
        "evaluations": whole.samples.height - frame.height,
    }
    assert {key: found[key] for key in expected} == expected


def columns(*rows: tuple[Any, ...], names: str) -> list[dict[str, Any]]:
    """TRL's rows: two responses to each of two prompts."""
    return [
        {"step": 1, "prompt": "ab"[place // 2], "completion": f"{place}"}
        | dict(zip(names.split(), row, strict=True))
        for place, row in enumerate(rows)
    ]


UP, DOWN = 0.7, -0.7
REWARDS = {
    "numbers of the prompt and of the answer stand behind the rewards": (
        "right form difficulty answer advantage",
        [(1, 0.5, 7.9, 3, UP), (0, 0.5, 7.9, 8, DOWN), (1, 0.5, 2, 5, UP), (0, 0.5, 2, 9, DOWN)],
        [1.5, 0.5, 1.5, 0.5],
    ),
    "numbers stand behind the advantages": (
        "right advantages answer",
        [(1, UP, 3), (0, DOWN, 8), (0, DOWN, 5), (1, UP, 4)],
        [1, 0, 0, 1],
    ),
    "a second reward decides": (
        "right brief advantage",
        [(1, 0.0, UP), (1, -0.5, DOWN), (0, -0.5, DOWN), (0, 0.0, UP)],
        [1.0, 0.5, -0.5, 0.0],
    ),
    "names tell where advantages do not": (
        "accuracy_reward format_reward difficulty advantage",
        [(1, 0.5, 7.9, 0), (1, 0.5, 7.9, 0), (0, 0.5, 7.9, 0), (0, 0.5, 7.9, 0)],
        [1.5, 1.5, 0.5, 0.5],
    ),
    "and where advantages fit both": (
        "accuracy_reward format_reward difficulty advantage",
        [(1, 0.5, 7.9, UP), (0, 0.5, 7.9, DOWN), (0, 0.5, 7.9, DOWN), (1, 0.5, 7.9, UP)],
        [1.5, 0.5, 0.5, 1.5],
    ),
    "the reward has a column": (
        "right form reward advantage",
        [(1, 0.5, 2.5, UP), (0, 0.5, 0.5, DOWN), (0, 0, 0, DOWN), (1, 0, 2, UP)],
        [2.5, 0.5, 0, 2],
    ),
    "nothing tells": ("right form", [(1, 0.5), (0, None), (None, None), (1, 0)], [1.5, 0, None, 1]),
    "there are only advantages": ("advantage", [(UP,), (DOWN,), (UP,), (DOWN,)], [None] * 4),
}


@pytest.mark.parametrize("case", REWARDS)
def test_the_reward_of_columns(tmp_path: Path, case: str) -> None:
    names, rows, rewards = REWARDS[case]
    path = dump(tmp_path / "completions_1.jsonl", *columns(*rows, names=names))
    assert formats.read(path).samples["reward"].to_list() == rewards


def line(step: int, *said: str) -> dict[str, Any]:
    """One of ms-swift's lines."""
    return {"gen_step": [step] * len(said), "prompt": ["p"] * len(said), "completion": [*said]}


def test_lines_that_hold_what_earlier_ones_do_count_once(tmp_path: Path) -> None:
    lines = [line(1, "a", "b"), line(2, "a", "b"), line(3, "a", "b", "c"), line(4, "d", "a")]
    path = dump(tmp_path / "completions.jsonl", *lines)
    notes: list[str] = []
    frame = formats.read(path, note=notes.append).samples
    assert frame["step"].to_list() == [1, 1, 3, 4, 4]
    assert sum("4 responses" in note and "earlier lines" in note for note in notes) == 1
    assert [each.said for each in said.responses(path)] == ["a", "b", "c", "d", "a"]


def test_tables_beside_a_growing_table_of_them_count_once(tmp_path: Path) -> None:
    names = ("step", "prompt", "completion", "right")
    rows = [[step, "p", f"{step}{at}", 1.0] for step in (1, 2, 3) for at in range(4)]
    wandb = tmp_path / "wandb" / "run" / "files"
    wandb.mkdir(parents=True)
    for step in (1, 2, 3):
        own = [dict(zip(names, row, strict=True)) for row in rows if row[0] == step]
        dump(tmp_path / "completions" / f"completions_{step:05d}.jsonl", *own)
        table = {"columns": names, "data": rows[: 4 * step]}
        dump(wandb / f"completions_{step}_ab.table.json", table)
    (tmp_path / "wandb" / "latest-run").symlink_to("run")
    assert formats.read(tmp_path).samples.height == 12
    assert len(list(said.responses(tmp_path))) == 12


GROUPS: dict[str, tuple[str, list[dict[str, Any]], list[int]]] = {
    "verl: an id joins what differs": (
        "1.jsonl",
        [{"input": f"q{n}", "output": "x", "step": 1, "uid": "u"} for n in range(3)],
        [3],
    ),
    "verl: the same prompt in two steps is one prompt": (
        "1.jsonl",
        [{"input": "q", "output": "x", "step": n, "uid": f"u{n}"} for n in range(2)],
        [1, 1],
    ),
    "slime": (
        "7.jsonl",
        [
            {"prompt": "q", "response": "x", "response_length": 3, "group_index": n // 2}
            for n in range(4)
        ],
        [2, 2],
    ),
    "ROLL": (
        "rollout_dump_data.step_3.jsonl",
        [{"prompt": ["q"] * 4, "responses": ["x"] * 4, "scores": [1] * 4, "id": [*"aabb"]}],
        [2, 2],
    ),
    "TRL: the same question about two images": (
        "completions_1.jsonl",
        [
            {"step": 1, "prompt": "q", "completion": "x", "images": [{"sha256": f"{n // 2}"}]}
            for n in range(4)
        ],
        [2, 2],
    ),
    "TRL: images within messages": (
        "completions_1.jsonl",
        [
            {"step": 1, "completion": "x"}
            | {"prompt": [{"role": "user", "content": [{"image": f"{n}.png"}, {"text": "q"}]}]}
            for n in range(2)
        ],
        [1, 1],
    ),
}


@pytest.mark.parametrize("case", GROUPS)
def test_groups_are_those_of_the_trainer(tmp_path: Path, case: str) -> None:
    name, records, groups = GROUPS[case]
    frame = formats.read(dump(tmp_path / name, *records)).samples
    by = frame.group_by("step", "prompt", maintain_order=True).len()
    assert by["len"].to_list() == groups
    if "two steps" in case:
        assert frame["prompt"].n_unique() == 1


@pytest.mark.parametrize(
    ("path", "evaluates"),
    [
        ("validation_data/1.jsonl", True),
        ("val-dumps/1.jsonl", True),
        ("eval/step_4/1.jsonl", True),
        ("rollout_data/eval_1.jsonl", True),
        ("eval/rollout_data/1.jsonl", False),
        ("retrieval/1.jsonl", False),
        ("evaluator_runs/1.jsonl", False),
    ],
)
def test_evaluations_are_told_by_names(tmp_path: Path, path: str, evaluates: bool) -> None:
    record = {"input": "q", "output": "x" * 8, "score": 1.0, "step": 1}
    trace = formats.read(dump(tmp_path / path, record))
    assert trace.samples["domain"].to_list() == ["validation" if evaluates else None]
    assert trace.of_training().samples.height == 1, "there is nothing else"
    assert len(list(said.responses(tmp_path / path))) == (not evaluates)
