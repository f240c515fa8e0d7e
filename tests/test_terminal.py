"""What others wrote is shown on a terminal and never obeyed; texts of ours and colours stay."""

import io
import os
import pty
import re
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from rollpacker.cli import main
from rollpacker.cli.mux.jobs import _shown_by
from rollpacker.errors import one_line, told, visible
from rollpacker.runtime.record.progress import Progress
from rollpacker.terminal import Terminal, coloured

TITLE = "\x1b]0;owned\x9c \x1b[2J\x9b1m \u202eevil \ud800"
SHOWN = "\\x1b]0;owned\\x9c \\x1b[2J\\x9b1m \\u202eevil \\ud800"
OBEYED = re.compile(
    "[\0-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]|\x1b(?!\\[[0-9;]*m)"
)


def terminal() -> tuple[Terminal, Callable[[], str]]:
    out = io.StringIO()
    return Terminal(file=out, force_terminal=True, width=200), out.getvalue


@given(st.text())
def test_nothing_is_obeyed(text: str) -> None:
    assert not OBEYED.search(visible(text))
    assert not OBEYED.search(coloured(text).replace("\r", ""))
    assert visible(visible(text)) == visible(text)


def test_text_of_any_language_stays() -> None:
    for text in ("Grüße, 你好 \u3000 ½\n\tx", "👍🏽 é"):
        assert visible(text) == text


def test_every_way_to_the_terminal_is_this_one() -> None:
    console, written = terminal()
    table = Table("name", title=TITLE)
    table.add_row(TITLE)
    for what in (TITLE, Text(TITLE, style="red"), table):
        console.print(what)
    assert not OBEYED.search(written())
    plain = re.sub("\x1b\\[[0-9;]*m", "", written())
    assert plain.count("\\x1b]0;owned") == 4
    assert "\x1b[31m" in written()


def test_notes_of_a_run() -> None:
    console, written = terminal()
    progress = Progress(console)
    progress.note(f"WARNING {TITLE}")
    progress.waiting(TITLE)
    assert written().count(SHOWN) == 2
    assert not OBEYED.search(written())


def test_errors_of_users() -> None:
    assert one_line(ValueError(TITLE)) == f"ValueError: {SHOWN}"
    assert SHOWN in told(ValueError(TITLE))


def test_the_last_line_of_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rollpacker", "samples", f"no{TITLE[:12]}"])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "\\x1b]0;owned" in said
    assert not OBEYED.search(said)


def test_what_a_program_printed() -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as out:
        show = _shown_by(out)
        show(b"\x1b[32mgood\x1b[0m \x1b]0;owned\x07 50%\r100%\n \xe2\x82")
        show(b"\xac")
        said = b""
        with suppress(OSError):
            while not said.endswith("€".encode()):
                said += os.read(ours, 1000)
    os.close(ours)
    assert said.decode() == "\x1b[32mgood\x1b[0m \\x1b]0;owned\\x07 50%\r100%\r\n €"


@pytest.mark.parametrize("columns", ["0", "00", ""])
def test_a_terminal_without_a_width_is_written_to(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "0")
    out = io.StringIO()
    console = Terminal(file=out)
    console.print("plain", soft_wrap=True)
    table = Table("name")
    table.add_row("cell")
    console.print(table)
    assert all(word in out.getvalue() for word in ("plain", "name", "cell"))
    assert min(console.size) > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--help"], "journal"),
        (["mux", "wait", "-h"], "--token-file"),
        (["samples", "--no"], "--no"),
    ],
)
def test_help_and_mistakes_are_shown_without_a_width(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr("sys.argv", ["rollpacker", *words])
    with pytest.raises(SystemExit):
        main()
    captured = capsys.readouterr()
    assert said in captured.out + captured.err
