"""Does what the tutorials say, word by word: their files, their commands, what they print.

Numbers may be others, and what the page leaves out as ``...`` may be anything.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks

from rollpacker.demo.model import build_model, build_tokenizer
from rollpacker.demo.warm_start import default_cache, place_of

pytestmark = pytest.mark.wide

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
WORDS = 600
"""Fewer than these: a tutorial is read in one go."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as a clone's, with the commands of this interpreter and a home of its own.

    The demo's model is there untrained: training it takes minutes.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("python", ""), ("rollpacker", "-m rollpacker ")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        (programs / name).chmod(0o755)
    home = tmp_path / "home"
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    model = place_of(default_cache())
    build_model(1).save_pretrained(model)
    build_tokenizer().save_pretrained(model)
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "examples").symlink_to(ROOT / "examples")
    return clone


def run(script: str, folder: Path) -> str:
    """What it prints; it has to succeed."""
    process = subprocess.Popen(
        ["bash", "-eu", "-o", "pipefail", "-c", script],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate()
    except BaseException:  # the time is up: a Ctrl-C, with which a command ends what it started
        os.killpg(process.pid, signal.SIGINT)
        raise
    assert process.returncode == 0, said[-3000:]
    return said


def form(line: str) -> re.Pattern[str]:
    """A line of a page, with any numbers, and anything for three dots."""
    number = r"-?\d+(?:[.,:]\d+)*"
    pieces = re.split(rf"(\.\.\.|{number}|\s+)", line.strip())
    any_of = {"...": ".*", " ": r"\s+", "0": number}

    def pattern(piece: str) -> str:
        kind = " " if piece.isspace() else "0" if re.fullmatch(number, piece) else piece
        return any_of.get(kind, re.escape(piece))

    return re.compile(rf"^\s*{''.join(map(pattern, pieces))}\s*$", re.M)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_works(page: Path, place: Path) -> None:
    said, runs = "", 0
    for block in blocks(page):
        if block.title:
            (place / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "bash" and not block.aside:
            said = run(block.text, place)
            runs += 1
        elif block.language == "text":
            lines = [line for line in block.text.splitlines() if line != "..."]
            assert [line for line in lines if not form(line).search(said)] == [], said
    assert runs > 0


def test_tutorials_are_short() -> None:
    long = {page.name: len(page.read_text("utf-8").split()) for page in TUTORIALS}
    assert len(long) == 4
    assert {name: words for name, words in long.items() if words >= WORDS} == {}


def test_a_line_that_is_not_printed_is_found() -> None:
    said = "job ada submitted\n│ off │    1.00x │  133.6 │ 0% │\nsaved: here, or there\n"
    for line in ("│ off │ 1.3x │ 1,000 │ 7% │", "saved: ...", "job ada submitted"):
        assert form(line).search(said)
    for line in ("│ race │ 1.00x │ 133.6 │ 0% │", "job ada", "off │ 1.00x │ 133.6 │ 0% │"):
        assert not form(line).search(said)
