"""Files that a path names: each is loaded once, and anew when it was edited."""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollpacker.user_code import find

NOTES = """
NOTES = []

def put(note):
    NOTES.append(note)

def get():
    return list(NOTES)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of the user's files; what they bring into this process is taken out again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(file: Path, text: str, seconds: float = 0.0) -> Path:
    """As if that was so long behind the first of January 2020."""
    file.write_text(text, encoding="utf-8")
    then = 1_577_836_800 + seconds
    os.utime(file, (then, then))
    return file


def test_functions_of_a_file_share_what_it_remembers(folder: Path) -> None:
    file = write(folder / "found_notes.py", NOTES)
    put, get = find(f"{file}:put"), find(f"{file}:get", "environment.path")
    put("hello")
    assert get() == ["hello"]
    assert put.__globals__ is get.__globals__


def test_a_file_is_the_same_however_it_is_named(folder: Path) -> None:
    file = write(folder / "found_same.py", NOTES)
    (folder / "linked").symlink_to(folder)
    assert find(f"{folder / 'linked' / file.name}:get") is find(f"{file}:get")


def test_files_of_the_same_name_are_not_the_same(folder: Path) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        write(folder / name / "found_twin.py", f"def f():\n    return {value}\n")
    assert find(f"{folder / 'a' / 'found_twin.py'}:f")() == 1
    assert find(f"{folder / 'b' / 'found_twin.py'}:f")() == 2


def test_files_of_one_name_have_classes_of_their_own(folder: Path) -> None:
    """Pickle found the first one's class for the second's."""
    for name in ("c", "d"):
        (folder / name).mkdir()
        source = f"class Thing:\n    where = '{name}'\ndef make():\n    return Thing()\n"
        write(folder / name / "found_pair.py", source)
    made = [find(f"{folder / name / 'found_pair.py'}:make")() for name in ("c", "d")]
    assert [pickle.loads(pickle.dumps(each)).where for each in made] == ["c", "d"]


def test_a_file_that_was_edited_is_loaded_anew(folder: Path) -> None:
    file = write(folder / "found_edited.py", "def f():\n    return 1\n")
    first = find(f"{file}:f")
    write(file, "def f():\n    return 2\n", seconds=5.0)
    assert find(f"{file}:f")() == 2
    assert first() == 1, "who has the old one keeps it"


@pytest.mark.parametrize("fault", ["raise KeyError('board')", "raise SystemExit(1)", "def f(:"])
def test_a_file_that_cannot_be_loaded_leaves_nothing_behind(folder: Path, fault: str) -> None:
    file = write(folder / "found_broken.py", fault)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^rewards: cannot import "):
            find(f"{file}:f")
        assert "found_broken" not in sys.modules
    write(file, "def f():\n    return 1\n", seconds=5.0)
    assert find(f"{file}:f")() == 1


def test_a_library_stays_when_a_file_of_its_name_cannot_be_loaded(folder: Path) -> None:
    file = write(folder / "json.py", "raise KeyError('board')")
    with pytest.raises(ValueError, match=r"^rewards: cannot import "):
        find(f"{file}:f")
    assert sys.modules["json"] is json
