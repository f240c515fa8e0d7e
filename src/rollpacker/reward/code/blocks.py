"""Finds the program in a response: its fenced blocks, and the one that counts. Pure and linear in
the text's length. It never parses or runs the model's text."""

from __future__ import annotations

import builtins
import re
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rollpacker.reward.base import after_thinking

_MARKER = r"\s*(?:(?:[-*+]|\d{1,9}[.)])\s+|>\s?)*"
"""Indentation, and the beginning of an item of a list or of a quotation."""
_FENCE = re.compile(rf"(?P<before>{_MARKER})(?P<fence>`{{3,}}(?=[^`]*$)|~{{3,}})(?P<info>.*)")
_LATE_FENCE = re.compile(r"(?<!`)(?P<fence>`{3,})(?P<info>[^`]*)$")
_LANGUAGE = re.compile(r"[{.\s]*([A-Za-z0-9_+#-]*)")
_PYTHON = ("python", "python3", "py", "py3")
_TRANSPARENT = ("markdown", "md")
"""Blocks of these languages, like those of no language, may hold fenced blocks."""
_QUOTED = re.compile(r"\s*> ?")
_TRIPLE = ("'''", '"""')
_QUOTES = re.compile(r"'{3}|\"{3}|\\.|#.*|'(?:[^'\\]|\\.)*+'|\"(?:[^\"\\]|\\.)*+\"")
"""Triple quotes, and other text that may hold quotes."""
_TARGET = r"\*?[A-Za-z_][\w.]{0,80}(?:\[[^\]\n]{0,80}\]){0,4}"
_CODE = re.compile(
    r"^[ \t]*(?:(?:async )?def \w|class \w|@\w|from \w[\w.]* import |import \w|return\b|"
    r"for [\w, ()]{1,80} in |(?:while|if|with) .*:$|"
    rf"{_TARGET}(?:, ?{_TARGET}){{0,20}} *(?::[^=\n]{{1,80}})?[-+*/|&%@^]{{0,2}}=[^=]|"
    r"\w[\w.]*\(.*\)[ \t]*(?:#.*)?$)",
    re.MULTILINE,
)  # a line that is code rather than prose or printed output
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
)  # the beginning of a block that is no program: a shell, or input and output
_READS = re.compile(r"\binput\(|\bstdin\b|\bopen\(0\b")
_PRINTS = re.compile(r"\bprint\(|\bwrite(?:lines)?\(")
_LEFT_OUT = re.compile(r"^[ \t]*(?:# *)?\.\.\.", re.MULTILINE)
_STATEMENT = re.compile(r"^[ \t]*[^\s#]", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a response that may be its program. ``marked``: its fence names Python.
    ``answer``: it is in the response's ``<answer>``."""

    code: str
    marked: bool
    answer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProgram:
    """The program of a response, and the rule that found it."""

    code: str
    rule: str


def find_program(response: str, names: Collection[str] = ()) -> FoundProgram | None:
    """Return the program in a response, or None."""
    blocks = find_blocks(response)
    return choose(blocks, names) if blocks else None


def find_blocks(response: str) -> list[Block]:
    """Return the blocks of a response that may be its program, in order.

    Only text after the last ``</think>`` counts. The blocks of the last closed ``<answer>`` come
    first. Without one in it, the answer itself is the block if it looks like code. Otherwise all
    blocks count. Only in an answer may the last block lack its end.
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
    """Return the block that counts.

    Blocks marked as Python come before those of no language, unless a later one of those is a whole
    program as well. Among those of no language, the ones that look like code come first. The last
    remaining block counts, except comments, sample input or output, and usage or tests of an
    earlier block. It defines one of ``names``, the names of which the row's tests need one, if any
    block does.
    """
    candidates = _candidates(blocks)
    left = [
        each
        for each in candidates
        if _CODE.search(each.code) or (each.marked and not _SAMPLE.match(each.code))
    ] or candidates
    rule = "the last block" if len(left) > 1 else "the only block"
    left = [block for block in left if _STATEMENT.search(block.code)] or left
    defining = [block for block in left if set(names) & _bound(block.code)]
    if names and defining and defining[-1] is not left[-1]:
        rule, left = "the last block that defines what the tests use", defining
    place = _last_program(left)
    if place < len(left) - 1:
        rule, left = "the last block that does not only use another", left[: place + 1]
    kind = "marked as Python" if left[-1].marked else "without a language"
    where = " in <answer>" if left[-1].answer else ""
    return FoundProgram(code=left[-1].code, rule=f"{rule} {kind}{where}")


def _candidates(blocks: Sequence[Block]) -> list[Block]:
    places = [place for place, block in enumerate(blocks) if block.marked]
    if not places:
        return list(blocks)
    marked = [blocks[place] for place in places]
    again = [each for each in blocks[places[-1] + 1 :] if _is_another(each.code, marked[-1].code)]
    return [*marked, *again]


def _is_another(code: str, program: str) -> bool:
    # Whether code is a whole program like an earlier one, or defines all that it defines.
    if _LEFT_OUT.search(code) or not _CODE.search(code):
        return False
    if _READS.search(program) and _PRINTS.search(program):
        return bool(_READS.search(code) and _PRINTS.search(code))
    defined = {*_DEFINED.findall(program)}
    return bool(defined) and defined <= {*_DEFINED.findall(code)}


def _last_program(blocks: Sequence[Block]) -> int:
    # The place of the last block that can run alone: it calls no function that only an earlier
    # block defines.
    earlier = Counter(name for block in blocks for name in {*_DEFINED.findall(block.code)})
    for place in range(len(blocks) - 1, 0, -1):
        code = blocks[place].code
        earlier.subtract({*_DEFINED.findall(code)})
        lacking = {*_CALLED.findall(code)} - _bound(code) - _BUILTINS
        if not any(earlier[name] > 0 for name in lacking):
            return place
    return 0


def _bound(code: str) -> set[str]:
    imports = _IMPORTED.findall(code)
    # Other modules are files of the response's own.
    library = sys.stdlib_module_names
    lists = [names for of, names in imports if not of or of.partition(".")[0] in library]
    lists += map(" ".join, _PARAMETERS.findall(code))
    return {*_DEFINED.findall(code), *_ASSIGNED.findall(code), *_WORD.findall(" ".join(lists))}


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
    # In the middle of a line, a fence must name Python or follow a colon or a tag.
    language = _language(match["info"])
    meant = language in _PYTHON or (not language and before.rstrip()[-1:] in (":", ">"))
    return _Opening(match["fence"], language, _ANY_INDENT, quoted=False) if meant else None


def _language(info: str) -> str:
    found = _LANGUAGE.match(info)
    return found[1].lower() if found else ""


def _inside(lines: Sequence[str], start: int, opening: _Opening) -> tuple[list[str], int, bool]:
    spare: tuple[list[str], int, bool] | None = None
    inside: list[str] = []
    quote = ""
    for place in range(start, len(lines)):
        line = _QUOTED.sub("", lines[place], 1) if opening.quoted else lines[place]
        if not opening.marked and _names_python(line):
            return inside, place, False  # the block was prose, or holds a program
        if (end := _end(line, opening.fence)) is not None:
            goes_on = place if end.another else place + 1
            found = ([*inside, *end.rest], goes_on, not (end.another and _names_python(line)))
            # A fence in a docstring ends the block only if no other fence does.
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
    bare = line.strip()
    if fence not in bare:
        return None
    if bare.startswith(fence):
        info = bare[len(fence) :]
        if info[:1] == fence[0]:
            # A longer fence may end the block. If it names a language, it begins another block.
            return None if bare.strip(fence[0]) else _End()
        return _End(another=bool(re.fullmatch(r"\s*[\w+#-]+", info)))
    stripped = line.rstrip()
    rest = stripped[: -len(fence)]
    # A fence in a comment belongs to an example.
    if stripped.endswith(fence) and rest[-1] != fence[0] and bare[: -len(fence)].strip() != "#":
        return _End(rest=(rest,))
    return None


def _names_python(line: str) -> bool:
    opening = _opening(line)
    return opening is not None and opening.marked


def _quote_after(line: str, quote: str) -> str:
    place = 0
    while True:
        if quote:
            end = line.find(quote, place)
            if end < 0:
                return quote
            quote, place = "", end + 3
        quotes = (each for each in _QUOTES.finditer(line, place) if each[0] in _TRIPLE)
        found = next(quotes, None)
        if found is None:
            return ""
        quote, place = found[0], found.end()


def _dedented(lines: Sequence[str], indent: int) -> str:
    first = next((line for line in lines if line.strip()), "")
    least = min(indent, len(first) - len(first.lstrip()))
    if least:
        lines = [line[min(least, len(line) - len(line.lstrip())) :] for line in lines]
    return "\n".join(lines) + "\n"
