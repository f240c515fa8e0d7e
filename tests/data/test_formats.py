"""Files and folders that other tools write."""

import gzip
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import polars
import pytest

from rollpacker.config import DataConfig
from rollpacker.data.base import DataError
from rollpacker.data.load import Loaded, load_rows

ROWS = [{"prompt": f"p{i}", "answer": str(i)} for i in range(4)]


def load(path: object, **settings) -> Loaded:
    given = [str(each) for each in path] if isinstance(path, list) else str(path)
    return load_rows(DataConfig(path=given, **settings))


def prompts(path: object, **settings) -> list[object]:
    return [row.prompt for row in load(path, **settings).rows]


def message(path: object, **settings) -> str:
    with pytest.raises(DataError) as caught:
        load(path, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_each_kind(folder: Path) -> list[Path]:
    frame = polars.DataFrame(ROWS)
    frame.write_parquet(folder / "a.parquet")
    frame.write_csv(folder / "a.csv")
    frame.write_ipc(folder / "file.arrow")
    frame.write_ipc_stream(folder / "stream.arrow")
    (folder / "a.jsonl").write_bytes(lines(ROWS))
    (folder / "a.json").write_text(json.dumps(ROWS))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS)))
    (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    (folder / "a.csv.gz").write_bytes(gzip.compress((folder / "a.csv").read_bytes()))
    return sorted(folder.iterdir())


def test_every_kind_of_file_holds_the_same_rows(tmp_path):
    files = write_each_kind(tmp_path)
    assert len(files) == 9
    expected = load(files[0]).rows
    assert [row.prompt for row in expected] == ["p0", "p1", "p2", "p3"]
    for file in files:
        assert load(file).rows == expected, file


def test_every_kind_of_file_cut_short_is_one_line(tmp_path):
    for file in write_each_kind(tmp_path):
        if file.suffix != ".csv":  # half a table is a table
            file.write_bytes(file.read_bytes()[:-9])
            assert str(file) in message(file)


def test_patterns_and_lists_of_files(tmp_path):
    (tmp_path / "more").mkdir()
    for number, name in enumerate(("b.jsonl", "a.jsonl", "more/c.jsonl", "notes.txt")):
        (tmp_path / name).write_bytes(lines(ROWS[number : number + 1]))
    assert prompts(tmp_path / "*.jsonl") == ["p1", "p0"]
    assert prompts(tmp_path / "**/*.jsonl") == ["p1", "p0", "p2"]
    assert prompts([tmp_path / "b.jsonl", tmp_path / "more" / "*"]) == ["p0", "p2"]
    assert load(tmp_path / "*.jsonl").mapping.startswith(
        f"{tmp_path / 'a.jsonl'}, {tmp_path / 'b.jsonl'}: 2 rows, canonical"
    )
    assert message(tmp_path / "*.parquet") == (
        f"data.path: no file matches '{tmp_path / '*.parquet'}'"
    )
    assert "notes.txt' is of no known type" in message(tmp_path / "*")
    assert message([]) == "data.path: the list of files is empty"
    assert message([tmp_path / "d.jsonl"]).startswith("data.path: no file")


def test_errors_in_one_of_many_files_name_it(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    (tmp_path / "b.jsonl").write_bytes(lines([ROWS[0] | {"id": "x"}, {"prompt": "a"}]))
    assert message(tmp_path / "*.jsonl").startswith(f"{tmp_path / 'b.jsonl'}, row 1: no answer")


def test_a_path_with_brackets_is_no_pattern(tmp_path):
    folder = tmp_path / "run[1]"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(ROWS))
    assert len(prompts(folder / "a.jsonl")) == 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    import datasets

    folder = tmp_path_factory.mktemp("saved")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(folder / "one"))
    datasets.DatasetDict({"train": one.select([0, 1]), "test": one.select([2])}).save_to_disk(
        str(folder / "splits")
    )
    datasets.Dataset.from_list(ROWS, split="test").save_to_disk(str(folder / "test"))
    return folder


def test_what_save_to_disk_wrote(saved):
    assert prompts(saved / "one") == ["p0", "p1", "p2", "p3"]
    assert prompts(saved / "splits") == ["p0", "p1"]
    assert prompts(saved / "splits", split="test") == ["p2"]
    assert prompts(saved / "test", split="test") == ["p0", "p1", "p2", "p3"]
    assert message(saved / "splits", split="dev") == (
        f"data.split: '{saved / 'splits'}' has no split 'dev', only ['train', 'test']"
    )
    assert message(saved / "one", split="test") == (
        f"data.split: '{saved / 'one'}' was saved without splits: leave data.split unset"
    )
    (arrow,) = (saved / "one").glob("*.arrow")
    assert prompts(arrow) == ["p0", "p1", "p2", "p3"]


def test_a_saved_dataset_with_pictures_is_refused_unread(tmp_path):
    import datasets

    features = datasets.Features(
        {"prompt": datasets.Value("string"), "picture": datasets.List(datasets.Image())}
    )
    # No picture at all: whoever decodes it fails in another way.
    rows = {"prompt": ["a"], "picture": [[{"path": None, "bytes": b"no picture"}]]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "set"))
    assert message(tmp_path / "set").startswith(
        f"{tmp_path / 'set'}: column 'picture' holds images, videos or sounds"
    )


@pytest.mark.parametrize("path", ["./data/trian", "a/b/c", "~/no/where"])
def test_a_path_that_is_nowhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message(path) == f"data.path: there is no file or folder '{path}'"


def test_names_that_the_hub_cannot_have(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message("my data/set") == (
        "data.path: there is no file or folder 'my data/set', and 'my data/set' is no name of a "
        "dataset on the hub"
    )


@pytest.mark.parametrize(
    ("key", "value"), [("split", "test"), ("options", {"delimiter": ";"}), ("seed", 3)]
)
@pytest.mark.parametrize("form", ["{}", "{}*", "list"])
def test_keys_that_nothing_reads_are_refused(tmp_path, key, value, form):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"prompt": "a", "answer": "1"}]))
    named = [str(path)] if form == "list" else form.format(path)
    assert message(named, **{key: value}) == (
        f"data.{key}: {value!r} has no effect if data.path is a file: remove it"
    )


def test_other_sources_read_some_of_them(saved, tmp_path):
    assert message("rg:gcd", split="test").startswith("data.split: 'test' has no effect if")
    assert message("rows.py:all", seed=3).endswith("data.path is a function: remove it")
    held = tmp_path / "held.jsonl"
    held.write_bytes(lines([{"prompt": "none of them"}]))
    assert load(saved / "splits", split="test", exclude=str(held)).rows


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", "question,answer\n1+1?,2\n".encode("utf-8-sig")),
        ("a.csv", b"question;answer\r\n1+1?;2\r\n"),
        ("a.csv", b"question, answer\n1+1?,2\n"),
        ("a.csv", b",question,answer\n0,1+1?,2\n"),
        ("a.csv", "question\tanswer\n1+1?\t2\n".encode("utf-16")),
        ("a.tsv", b"question\tanswer\n1+1?\t2\n"),
        ("a.tsv.gz", gzip.compress(b"question\tanswer\n1+1?\t2\n")),
        ("a.jsonl", '{"question": "1+1?", "answer": "2"}\n'.encode("utf-16")),
        ("a.json", '[{"question": "1+1?", "answer": "2"}]'.encode("utf-8-sig")),
    ],
    ids=range(9),
)
def test_tables_as_spreadsheets_and_shells_write_them(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert [(row.prompt, row.answer) for row in load(tmp_path / name).rows] == [("1+1?", "2")]


def test_half_a_file_of_wide_characters(tmp_path):
    for name in ("a.csv", "a.jsonl"):
        (tmp_path / name).write_bytes("question,answer".encode("utf-16")[:-1])
        assert message(tmp_path / name).startswith(f"{tmp_path / name}: cannot be read: Unicode")


def test_an_object_of_columns_says_how_to_write_rows(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"question": {"0": "a"}, "answer": {"0": "1"}}))
    assert message(path) == (
        f"{path}: expected a list of objects, found an object of 'question', 'answer' (pandas: "
        "to_json(path, orient='records'))"
    )


TURNS = [{"role": "system", "content": "It's brief"}, {"role": "user", "content": "1+1?"}]


def test_lists_in_tables_of_text(tmp_path):
    """As pandas writes them, and of arrays as it cannot be read again."""
    rows = [{"prompt": str(TURNS), "reward_model": str({"style": "rule", "ground_truth": "2"})}]
    path = tmp_path / "a.csv"
    polars.DataFrame(rows).write_csv(path)
    (row,) = load(path).rows
    assert (row.prompt, row.answer) == (TURNS, "2")
    rows[0]["prompt"] = "[" + "\n ".join(map(str, TURNS)) + "]"
    polars.DataFrame(rows).write_csv(path)
    assert message(path) == (
        f"{path}, row 0: the prompt is the text of chat messages, but neither as JSON nor as "
        "Python writes them: write the column with json.dumps, or the file as parquet"
    )
    text = "[{'role': 'admin'}] is no JSON, is it"
    polars.DataFrame({"prompt": text, "answer": "no"}).write_csv(path)
    assert prompts(path) == [text]


def test_arrays_and_tables_that_functions_return(monkeypatch):
    pandas = pytest.importorskip("pandas")
    rows = [{"prompt": np.array(TURNS, object), "answer": "2"}, {"prompt": "a", "answer": "1"}]
    module = ModuleType("array_rows")
    monkeypatch.setitem(sys.modules, "array_rows", module)
    vars(module)["rows"] = lambda: rows
    assert prompts("array_rows:rows") == [TURNS, "a"]
    vars(module)["rows"] = lambda: pandas.DataFrame(rows)
    assert prompts("array_rows:rows") == [TURNS, "a"]
    vars(module)["rows"] = lambda: polars.DataFrame(ROWS)
    assert prompts("array_rows:rows") == [row["prompt"] for row in ROWS]
