"""Finds the program in a response: its fenced blocks, and which of them counts.

Pure and linear in the text's length: nothing here parses or runs what a model wrote.
"""

from __future__ import annotations

import builtins
import re
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rollpacker.reward.base import after_thinking

_MARKER = r"\s*(?:(?:[-*+]|\d{1,9}[.)])\s+|>\s?)*"
"""Indentation, and what begins an item of a list or a quotation."""
_FENCE = re.compile(rf"(?P<before>{_MARKER})(?P<fence>`{{3,}}(?=[^`]*$)|~{{3,}})(?P<info>.*)")
_LATE_FENCE = re.compile(r"(?<!`)(?P<fence>`{3,})(?P<info>[^`]*)$")
_LANGUAGE = re.compile(r"[{.\s]*([A-Za-z0-9_+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_TRANSPARENT = ("markdown", "md")
"""A block of these may hold fenced blocks, as one of no language may."""
_QUOTED = re.compile(r"\s*> ?")
_TRIPLE = ("'''", '"""')
_QUOTES = re.compile(r"'{3}|\"{3}|\\.|#.*|'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"")
"""Triple quotes, and what may have some in it that open no text."""
_TARGET = r"\*?[A-Za-z_][\w.]{0,80}(?:\[[^\]\n]{0,80}\]){0,4}"
_CODE = re.compile(
    r"^[ \t]*(?:(?:async )?def \w|class \w|@\w|from \w[\w.]* import |import \w|return\b|"
    r"for [\w, ()]{1,80} in |(?:while|if|with) .*:$|"
    rf"{_TARGET}(?:, ?{_TARGET}){{0,20}} *(?::[^=\n]{{1,80}})?[-+*/|&%@^]{{0,2}}=[^=]|"
    r"\w[\w.]*\(.*\)[ \t]*(?:#.*)?$)",
    re.MULTILINE,
)
"""A line that is code rather than prose or printed output."""
_DEFINED = re.compile(r"^[ \t]*(?:async )?(?:def|class) (\w+)", re.MULTILINE)
_ASSIGNED = re.compile(r"^[ \t]*(\w+) *(?::[^=\n]*)?=[^=]", re.MULTILINE)
_IMPORTED = re.compile(r"^[ \t]*(?:from ([\w.]+) )?import (.*)", re.MULTILINE)
_PARAMETERS = re.compile(
    r"\bdef \w+\(([^)]{0,400})|\blambda ([^:\n]{0,200}):|\bfor ([^\n]{1,200}?) in "
)
_CALLED = re.compile(r"(?<![\w.])(\w+)\(")
_WORD = re.compile(r"\w+")
_BUILTINS = frozenset(dir(builtins))
_SAMPLE = re.compile(
    r"\s*(?:\$ |>>> |python3? [\w./]+\.py|"
    r"(?:(?:sample|example) )?(?:input|output|example|explanation|stdin|stdout)(?: \d+)?"
    r"[ \t]*(?::|$))",
    re.IGNORECASE | re.MULTILINE,
)
"""How what is no program begins: a shell, or input and output."""
_READS = re.compile(r"\binput\(|\bstdin\b|\bopen\(0\b")
_PRINTS = re.compile(r"\bprint\(|\bwrite(?:lines)?\(")
_LEFT_OUT = re.compile(r"^[ \t]*(?:# *)?\.\.\.", re.MULTILINE)
_STATEMENT = re.compile(r"^[ \t]*[^\s#]", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a response that may be its program.

    Args:
        code: its lines, without the indentation of its fence.
        marked: its fence names Python, rather than no language.
        answer: it is in the response's ``<answer>``.
    """

    code: str
    marked: bool
    answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProgram:
    """The program of a response."""

    code: str
    rule: str


def find_program(response: str, names: Collection[str] = ()) -> FoundProgram | None:
    """The program in a response, as ``choose`` takes it; None without one."""
    blocks = find_blocks(response)
    return choose(blocks, names) if blocks else None


def find_blocks(response: str) -> list[Block]:
    """The blocks of a response that may be its program, in order.

    After the last ``</think>``: those in the last closed ``<answer>``; without a block in it, the
    answer itself if it looks like code; else those anywhere. Only in an answer may the last block
    lack its end.
    """
    text = after_thinking(response).replace("\r\n", "\n")
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    if start >= 0:
        answer = text[start + len("<answer>") : end]
        if blocks := _fenced(answer, answer=True):
            return blocks
        if _CODE.search(answer):
            return [Block(code=answer.strip("\n") + "\n", marked=True, answer=True)]
    return _fenced(text)


def choose(blocks: Sequence[Block], names: Collection[str] = ()) -> FoundProgram:
    """The block that counts.

    Blocks marked as Python come before those of no language, but for a later one that is a whole
    program as well, and of those of no language the ones that look like code come first. Of the
    rest the last one counts, but for comments and samples of input and output, for usage and tests
    of what an earlier one defines, and, with ``names``, for those that define none of them where
    another does.

    Args:
        blocks: of a response, at least one.
        names: functions and classes of which the row's tests need one.
    """
    candidates = _candidates(blocks)
    left = [each for each in candidates if _may_be_code(each)] or candidates
    rule = "the last block" if len(left) > 1 else "the only block"
    left = [block for block in left if _STATEMENT.search(block.code)] or left
    defining = [block for block in left if set(names) & _bound(block.code)]
    if names and defining and defining[-1] is not left[-1]:
        rule, left = "the last block that defines what the tests use", defining
    place = _last_program(left)
    if place < len(left) - 1:
        rule, left = "the last block that is no use of another", left[: place + 1]
    kind = "marked as Python" if left[-1].marked else "without a language"
    where = " in <answer>" if left[-1].answer else ""
    return FoundProgram(code=left[-1].code, rule=f"{rule} {kind}{where}")


def _may_be_code(block: Block) -> bool:
    return bool(_CODE.search(block.code)) or (block.marked and not _SAMPLE.match(block.code))


def _candidates(blocks: Sequence[Block]) -> list[Block]:
    """The blocks marked as Python, and those behind them that say the same again; all if none is
    marked."""
    places = [place for place, block in enumerate(blocks) if block.marked]
    if not places:
        return list(blocks)
    marked = [blocks[place] for place in places]
    again = [each for each in blocks[places[-1] + 1 :] if _is_another(each.code, marked[-1].code)]
    return [*marked, *again]


def _is_another(code: str, program: str) -> bool:
    """Whether code is a whole program as an earlier one is, or defines all that it defines."""
    if _LEFT_OUT.search(code) or not _CODE.search(code):
        return False
    if _READS.search(program) and _PRINTS.search(program):
        return bool(_READS.search(code) and _PRINTS.search(code))
    defined = {*_DEFINED.findall(program)}
    return bool(defined) and defined <= {*_DEFINED.findall(code)}


def _last_program(blocks: Sequence[Block]) -> int:
    """The place of the last block that calls nothing which it lacks and an earlier one defines, as
    such a block cannot run alone."""
    earlier = Counter(name for block in blocks for name in {*_DEFINED.findall(block.code)})
    for place in range(len(blocks) - 1, 0, -1):
        code = blocks[place].code
        earlier.subtract({*_DEFINED.findall(code)})
        lacking = {*_CALLED.findall(code)} - _bound(code) - _BUILTINS
        if not any(earlier[name] > 0 for name in lacking):
            return place
    return 0


def _bound(code: str) -> set[str]:
    """Names that code defines, imports from the library, assigns to or has as parameters."""
    imports = _IMPORTED.findall(code)
    lists = [names for module, names in imports if not module or _is_library(module)]
    lists += map(" ".join, _PARAMETERS.findall(code))
    return {*_DEFINED.findall(code), *_ASSIGNED.findall(code), *_WORD.findall(" ".join(lists))}


def _is_library(module: str) -> bool:
    """Whether there is such a module; others are files of the response's own."""
    return module.partition(".")[0] in sys.stdlib_module_names


# -- fences


def _fenced(text: str, answer: bool = False) -> list[Block]:
    blocks: list[Block] = []
    lines = text.split("\n")  # not splitlines: a form feed or U+2028 may be part of a literal
    place = 0
    while place < len(lines):
        opening = _opening(lines[place])
        place += 1
        if opening is None or opening.language in _TRANSPARENT:
            continue
        inside, place, closed = _inside(lines, place, opening)
        if opening.wanted and (closed or answer):
            code = _dedented(inside, opening.indent)
            named, _, rest = code.lstrip("\n").partition("\n")
            if not opening.marked and named.strip().lower() in _PYTHON:
                blocks.append(Block(code=rest, marked=True, answer=answer))
            else:
                blocks.append(Block(code=code, marked=opening.marked, answer=answer))
    return blocks


_ANY_INDENT = 1 << 20


@dataclass(frozen=True, slots=True)
class _Opening:
    fence: str
    language: str
    indent: int
    quoted: bool = False

    @property
    def marked(self) -> bool:
        return self.language in _PYTHON

    @property
    def wanted(self) -> bool:
        return self.marked or not self.language


def _opening(line: str) -> _Opening | None:
    """The fence that a line opens: it begins it, or follows a sentence."""
    if "```" not in line and "~~~" not in line:
        return None
    if match := _FENCE.fullmatch(line):
        before = match["before"]
        quoted = ">" in before
        indent = 0 if quoted else len(before)
        return _Opening(match["fence"], _language(match["info"]), indent, quoted)
    match = _LATE_FENCE.search(line)
    if match is None or "```" in (before := line[: match.start()]):
        return None
    # In the middle of a line it must be meant as one: named, or after a colon or a tag.
    language = _language(match["info"])
    meant = language in _PYTHON or (not language and before.rstrip()[-1:] in (":", ">"))
    return _Opening(match["fence"], language, _ANY_INDENT, quoted=False) if meant else None


def _language(info: str) -> str:
    found = _LANGUAGE.match(info)
    return found[1].lower() if found else ""


def _inside(lines: Sequence[str], start: int, opening: _Opening) -> tuple[list[str], int, bool]:
    """The lines of a block, the place to go on from, and whether it has an end."""
    spare: tuple[list[str], int, bool] | None = None
    inside: list[str] = []
    quote = ""
    for place in range(start, len(lines)):
        line = _QUOTED.sub("", lines[place], 1) if opening.quoted else lines[place]
        if not opening.marked and _names_python(line):
            return inside, place, False  # this was no block, or holds one
        if (end := _end(line, opening.fence)) is not None:
            goes_on = place if end.another else place + 1
            found = ([*inside, *end.rest], goes_on, not (end.another and _names_python(line)))
            # A fence in a docstring is not the end, unless there is no other.
            if not quote:
                return found
            spare = spare or found
        if opening.marked:
            quote = _quote_after(line, quote)
        inside.append(line)
    return spare or (inside, len(lines), False)


@dataclass(frozen=True, slots=True)
class _End:
    rest: tuple[str, ...] = ()
    another: bool = False


def _end(line: str, fence: str) -> _End | None:
    """How a line ends a block: what it still has of it, or that it begins another one."""
    bare = line.strip()
    if fence not in bare:
        return None
    if bare.startswith(fence):
        info = bare[len(fence) :]
        if info[:1] == fence[0]:
            # A longer fence may end it, and begins a block of its own where it names a language.
            return None if bare.strip(fence[0]) else _End()
        return _End(another=bool(re.fullmatch(r"\s*[\w+#-]+", info)))
    stripped = line.rstrip()
    rest = stripped[: -len(fence)]
    # In a comment it belongs to an example.
    if stripped.endswith(fence) and rest[-1] != fence[0] and bare[: -len(fence)].strip() != "#":
        return _End(rest=(rest,))
    return None


def _names_python(line: str) -> bool:
    opening = _opening(line)
    return opening is not None and opening.marked


def _quote_after(line: str, quote: str) -> str:
    """The triple quotes that are open after a line, if any were before."""
    place = 0
    while True:
        if quote:
            end = line.find(quote, place)
            if end < 0:
                return quote
            quote, place = "", end + 3
        found = _next_quote(line, place)
        if found is None:
            return ""
        quote, place = found[0], found.end()


def _next_quote(line: str, start: int) -> re.Match[str] | None:
    found = (each for each in _QUOTES.finditer(line, start) if each[0] in _TRIPLE)
    return next(found, None)


def _dedented(lines: Sequence[str], indent: int) -> str:
    """Lines without the indentation of their fence, as far as the first of them has it."""
    first = next((line for line in lines if line.strip()), "")
    least = min(indent, len(first) - len(first.lstrip()))
    if least:
        lines = [line[min(least, len(line) - len(line.lstrip())) :] for line in lines]
    return "\n".join(lines) + "\n"
