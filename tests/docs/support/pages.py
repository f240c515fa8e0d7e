"""The pages of the documentation as programs read them: blocks, and the commands in them."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[3]
SHELL = ("bash", "sh", "console", "")
"""Languages of blocks that hold commands; without one it may be output too."""

_FENCE = re.compile(r"^( *)```(\w*)(?: title=\"(.+?)\")? *\n(.*?)^\1``` *$", re.M | re.S)
_ASIDE = re.compile(r"<!-- not run: .*-->\n\Z")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_HERE = re.compile(r"<<-?\s*'?(\w+)'?")
_PROMPT = re.compile(r"(?:\w+)?\$ ")
_SYNOPSIS = re.compile(r" \[|\.\.\.")
_ALIASES = {"mux": ["rollpacker", "mux"]}
"""Shell functions that a page defines and uses."""
_OPERATORS = set("();<>|&")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Args:
        language: behind the fence; empty for none.
        title: of the file that it holds; empty for none.
        text: its lines, without indentation.
        line: of its first line in the page, from 1 on.
        aside: the page says that it is not run.
    """

    language: str
    title: str
    text: str
    line: int
    aside: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """One program's call.

    Args:
        where: page and line.
        words: what a shell makes of it.
        whole: its arguments are complete; otherwise it only names a command.
    """

    where: str
    words: tuple[str, ...]
    whole: bool = True


def pages() -> list[Path]:
    """All pages whose commands a reader may copy."""
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
    for folder in ("docs", "examples", "experiments", "benchmarks"):
        found += sorted((ROOT / folder).rglob("*.md"))
    return found


def blocks(page: Path) -> list[Block]:
    """Its fenced blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=each[2],
            title=each[3] or "",
            text=re.sub(rf"^{each[1]}", "", each[4], flags=re.M),
            line=text.count("\n", 0, each.start()) + 2,
            aside=bool(_ASIDE.search(text, 0, each.start())),
        )
        for each in _FENCE.finditer(text)
    ]


def commands(page: Path) -> Iterator[Command]:
    """Those in its blocks of a shell, then those that its text names in backquotes."""
    name = page.relative_to(ROOT).as_posix()
    for block in blocks(page):
        if block.language in SHELL:
            try:
                yield from calls(block.text, name, block.line)
            except ValueError as error:  # no command: what a program prints
                if block.language:
                    raise ValueError(f"{name}:{block.line}: {error}") from error
    text = _FENCE.sub(lambda each: "\n" * each[0].count("\n"), page.read_text(encoding="utf-8"))
    for span in _SPAN.finditer(text):
        where = f"{name}:{text.count(chr(10), 0, span.start()) + 1}"
        with contextlib.suppress(ValueError):  # prose with an apostrophe
            yield from _calls(where, " ".join(span[1].split()), whole=False)


def calls(text: str, page: str = "", line: int = 1) -> Iterator[Command]:
    """Those of a block that begins at a line of a page."""
    for number, command in _lines(text):
        yield from _calls(f"{page}:{line + number}", command, whole=True)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Commands of a block, each with the number of its line; what they print is left out."""
    prompted = any(_PROMPT.match(line) for line in text.splitlines())
    end, begun, held = "", 0, ""
    for number, line in enumerate(text.splitlines()):
        if end:  # of a file within the block
            end = "" if line.strip() == end else end
            continue
        if not held:
            begun = number
            prompt = _PROMPT.match(line)
            if prompted and prompt is None:
                continue
            line = line[prompt.end() :] if prompt else line
        held += line.removesuffix("\\")
        if not line.endswith("\\"):
            here = _HERE.search(held)
            end = here[1] if here else ""
            yield begun, _HERE.sub(" ", held)
            held = ""


def _calls(where: str, line: str, *, whole: bool) -> Iterator[Command]:
    """The calls in a line. Raises ``ValueError`` where a shell cannot read it."""
    if '"$@"' in line:
        return
    forms = _forms(line) if _is_synopsis(line) else [line]
    open_ended = line.rstrip().endswith("...")
    for form in forms:
        for call in _parts(_split(form)):
            if named := _without_prefix(call):
                yield Command(where, tuple(named), whole and not open_ended)


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _parts(words: Sequence[str]) -> Iterator[list[str]]:
    """What is between the operators of a shell."""
    part: list[str] = []
    for word in [*words, ";"]:
        if word and set(word) <= _OPERATORS:
            yield part
            part = []
        else:
            part.append(word)


def _without_prefix(call: Sequence[str]) -> list[str]:
    """From the program on: variables, prompts and launchers go, and its folder."""
    words = [*call]
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("srun", "nice", "$")):
        words = words[1:]
    if not words:
        return []
    return [*_ALIASES.get(words[0], [words[0].rpartition("/")[2]]), *words[1:]]


def _is_synopsis(line: str) -> bool:
    unquoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", line.partition(" #")[0])
    return line.startswith(("rollpacker ", "mux ")) and bool(_SYNOPSIS.search(unquoted))


def _forms(line: str) -> list[str]:
    """The calls that a synopsis stands for, each with all of its options."""
    plain = re.sub(r"[\[\]]|\.\.\.", " ", line).replace(" | ", " ")
    return [" ".join(each) for each in product(*(word.split("|") for word in plain.split()))]
