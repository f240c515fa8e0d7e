import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import DataConfig
from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row
from rollpacker.data.held_out import hold_out
from rollpacker.data.load import load_rows


def rows(count: int, prompts: int = 10**6) -> list[Row]:
    return [
        Row(id=PromptId(f"r{i}"), prompt=f"p{i % prompts}", answer=1, domain="d", columns={})
        for i in range(count)
    ]


def ids(part: list[Row]) -> list[str]:
    return [row.id for row in part]


def test_other_sizes_and_orders_agree():
    training, held_out = hold_out(rows(400), 0.1, 0)
    assert 20 < len(held_out) < 60
    assert sorted(ids(training) + ids(held_out)) == sorted(ids(rows(400)))
    _, fewer = hold_out(rows(200), 0.1, 0)
    assert ids(fewer) == [name for name in ids(held_out) if int(name[1:]) < 200]
    _, backwards = hold_out(rows(400)[::-1], 0.1, 0)
    assert ids(backwards) == ids(held_out)[::-1]
    _, more = hold_out(rows(400), 0.2, 0)
    assert set(ids(held_out)) < set(ids(more))
    assert ids(hold_out(rows(400), 0.1, 1)[1]) != ids(held_out)


def test_the_split_of_today_is_that_of_tomorrow():
    """A change of it would put held-out problems into the training of resumed runs."""
    assert ids(hold_out(rows(40), 0.1, 0)[1]) == ["r19", "r30"]


def test_rows_that_ask_the_same_stay_together():
    """Spaces and system turns aside."""
    some = [replace(row, prompt=f"p{n % 200}{' ' * (n // 200)}") for n, row in enumerate(rows(400))]
    training, held_out = hold_out(some, 0.3, 0)
    assert not {row.prompt.strip() for row in training} & {row.prompt.strip() for row in held_out}
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "p0"}]
    training, held_out = hold_out([*some, replace(some[0], id="x", prompt=turns)], 0.3, 0)
    assert ("x" in ids(held_out)) is ("r0" in ids(held_out))


@given(prompts=st.integers(2, 30), seed=st.integers(0, 9))
def test_rows_with_one_prompt_stay_together(prompts, seed):
    try:
        training, held_out = hold_out(rows(90, prompts), 0.5, seed)
    except DataError:
        return
    assert not {row.prompt for row in training} & {row.prompt for row in held_out}


def test_parts_without_rows():
    with pytest.raises(DataError, match=r"eval.fraction=0.001 holds out none of 3 rows: raise it"):
        hold_out(rows(3), 0.001, 0)
    with pytest.raises(DataError, match=r"eval.fraction=0.999 leaves none of 3 rows: lower it"):
        hold_out(rows(3), 0.999, 0)


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def numbered(word: str, count: int = 3) -> list[dict]:
    return [{"id": n, "prompt": f"{word}{n}", "answer": "1"} for n in range(count)]


def test_equal_numbers_of_different_files_exclude_nothing(tmp_path):
    """Files of pandas and of the hub number their rows."""
    train = jsonl(tmp_path / "train.jsonl", *numbered("train "))
    held = jsonl(tmp_path / "held.jsonl", *numbered("held "), {"id": 7, "prompt": "train 1"})
    loaded = load_rows(DataConfig(path=train, exclude=held))
    assert [row.id for row in loaded.rows] == ["0", "2"]
    assert (
        f"1 rows dropped that are in {held} (1 by prompt); 2 rows kept whose id is in {held} "
        in (loaded.mapping)
    )


def test_a_file_of_ids_excludes_by_id(tmp_path):
    train = jsonl(tmp_path / "train.jsonl", *numbered("train "), {"prompt": "b", "answer": "2"})
    held = jsonl(tmp_path / "held.jsonl", {"id": 1}, {"id": "2", "prompt": None}, {"id": "x"})
    loaded = load_rows(DataConfig(path=train, exclude=held))
    assert [row.prompt for row in loaded.rows] == ["train 0", "b"]
    assert f"2 rows dropped that are in {held} (2 by id)" in loaded.mapping


TURN = {"role": "user", "content": "What  is\n1+1?"}


@pytest.mark.parametrize(
    "held",
    [
        {"prompt": "What is 1+1? "},
        {"question": "What is 1+1?", "id": 3},
        {"messages": [{"role": "system", "content": "Be brief."}, TURN]},
        {"messages": [TURN, {"role": "assistant", "content": "2"}]},
        {"conversations": [{"from": "human", "value": "What is 1+1?"}]},
        {"prompt": json.dumps([TURN])},
    ],
)
@pytest.mark.parametrize("prompt", ["What is 1+1?", [TURN]])
def test_a_prompt_is_known_in_every_layout(tmp_path, prompt, held):
    rows = [{"prompt": prompt, "answer": "2"}, {"prompt": "What is 1+2?", "answer": "3"}]
    train = jsonl(tmp_path / "train.jsonl", *rows)
    path = jsonl(tmp_path / "held.jsonl", held)
    assert len(load_rows(DataConfig(path=train, exclude=path)).rows) == 1


def test_conversations_are_compared_whole(tmp_path):
    def chat(second: str) -> list[dict]:
        said = {"role": "assistant", "content": "2"}
        return [TURN, said, {"role": "user", "content": second}]

    rows = [{"messages": chat(text), "answer": "2"} for text in ("And 1 + 2?", "And 2+2?")]
    train = jsonl(tmp_path / "train.jsonl", *rows)
    path = jsonl(tmp_path / "held.jsonl", {"messages": chat("And  1 + 2? ")}, {"messages": [TURN]})
    assert len(load_rows(DataConfig(path=train, exclude=path)).rows) == 1


def test_ids_that_number_the_rows_of_each_file_are_not_their_names(tmp_path):
    names = ["a", "b"]
    files = [jsonl(tmp_path / f"{n}.jsonl", *numbered(f"{n} ")) for n in names]
    loaded = load_rows(DataConfig(path=files))
    assert len({row.id for row in loaded.rows}) == 6
    assert "id <- hash of prompt and answer, as different rows have the id '0'" in loaded.mapping
    assert loaded.rows[0].columns["id"] == 0
    backwards = load_rows(DataConfig(path=files[::-1]))
    assert {row.id: row.prompt for row in backwards.rows} == {
        row.id: row.prompt for row in loaded.rows
    }
    assert [row.id for row in load_rows(DataConfig(path=files[0])).rows] == ["0", "1", "2"]


@pytest.mark.parametrize("empty", [None, float("nan"), "", " "])
def test_an_id_that_is_none(tmp_path, empty):
    rows = [{"id": empty, "prompt": name, "answer": "1"} for name in "ab"]
    loaded = load_rows(DataConfig(path=jsonl(tmp_path / "a.jsonl", *rows)))
    assert all(len(row.id) == 16 for row in loaded.rows)
    assert loaded.mapping.endswith("id <- hash of prompt and answer")
