"""Calls as Python has them: a list of them that is all of a reply, or a block of ``tool_code``.

Gemma 3 has no format of its own; these are what its documentation asks it for. Nothing is run.
"""

from __future__ import annotations

import re

from rollpacker.env.calls.call import BadCall, Call, Parsed, call_of, deep
from rollpacker.env.calls.formats.literals import LiteralError, Notation, TooDeepError
from rollpacker.env.calls.formats.scan import Calls, as_json, between, skip

_LIST = re.compile(r"\[\s*(?=[A-Za-z_][\w.]*\()")
_BLOCK = re.compile(r"```tool_code[^\S\n]*\n?")
_FENCE = re.compile(r"```(?:python)?[^\S\n]*\n?")
_FENCE_END = re.compile(r"\s*(?:```|\Z)")
_HEAD = re.compile(r"([A-Za-z_][\w.]*)\s*\(")
_BARE = re.compile(r"[^\s,:=()\[\]{}\"'`]+")
_QUOTES = re.compile(r"([rRbBuUfF]?)(\"\"\"|'''|\"|')")
_ESCAPE = re.compile(
    r"\\(?:(\n)|([\\'\"abfnrtv])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})"
    r"|([0-7]{1,3}))"
)
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def pythonic(text: str, start: int) -> Parsed:
    """A list, or blocks."""
    begin = skip(text, start)
    fence = _FENCE.match(text, begin)
    listed = _LIST.match(text, begin if fence is None else fence.end())
    if listed is None:
        return between(text, start, _BLOCK, _block)
    calls, end = _calls(text, listed.end(), "]")
    if fence is not None and (closed := _FENCE_END.match(text, end)) is not None:
        end = closed.end()
    return Parsed(text[:start] + text[end:].strip(), calls)


def _block(text: str, start: int) -> tuple[Calls, int]:
    """The calls of a block: a list, or one behind the other."""
    listed = _LIST.match(text, skip(text, start))
    calls, end = _calls(text, start, "```") if listed is None else _calls(text, listed.end(), "]")
    if isinstance(calls[-1], BadCall):
        return calls, end
    closed = _FENCE_END.match(text, end)
    if closed is None:
        return (*calls, BadCall("there is text behind the calls of the block")), _end(text, end)
    return calls, closed.end()


def _end(text: str, start: int) -> int:
    place = text.find("```", start)
    return len(text) if place < 0 else place + 3


def _calls(text: str, place: int, close: str) -> tuple[Calls, int]:
    """One at least, and where they end; the first that is none ends them."""
    calls: list[Call | BadCall] = []
    while True:
        place = skip(text, place)
        if calls and (place == len(text) or text.startswith(close, place)):
            return tuple(calls), place + (close == "]" and place < len(text))
        call, place = _call(text, place)
        calls.append(call)
        if isinstance(call, BadCall):
            return tuple(calls), _end(text, place)
        place = skip(text, place)
        place += text.startswith((",", ";"), place)


def _call(text: str, place: int) -> tuple[Call | BadCall, int]:
    head = _HEAD.match(text, place)
    if head is None:
        return BadCall("a call must be NAME(argument=value, ...)"), place
    try:
        arguments, end = _NOTATION.named(text, head.end(), ")", "=")
    except TooDeepError:
        return BadCall(deep(head[1]), head[1]), place
    except LiteralError as error:
        wrong = f"the call of {head[1]} is no Python of NAME(argument=value, ...): {error}"
        return BadCall(wrong, head[1]), place
    return call_of(head[1], arguments), end


def _string(text: str, place: int) -> tuple[str, int] | None:
    """Of one kind of quotes or another; a line may end inside of it, models forget that."""
    opening = _QUOTES.match(text, place)
    if opening is None:
        return None
    prefix, quotes = opening.groups()
    end = opening.end()
    while (end := text.find(quotes, end)) >= 0 and _escaped(text, opening.end(), end):
        end += 1
    if end < 0:
        raise LiteralError(f"text has no end: {quotes} is missing")
    body = text[opening.end() : end]
    return body if prefix.lower() == "r" else _unescaped(body), end + len(quotes)


def _escaped(text: str, begin: int, place: int) -> bool:
    """Whether an odd number of backslashes stands before a place."""
    first = place
    while first > begin and text[first - 1] == "\\":
        first -= 1
    return (place - first) % 2 == 1


def _unescaped(body: str) -> str:
    """As Python and JSON read it: two halves of a character are one."""
    text = _ESCAPE.sub(_escape, body)
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _escape(found: re.Match[str]) -> str:
    line, letter, *codes, octal = found.groups()
    if line is not None:
        return ""
    if letter is not None:
        return _LETTERS.get(letter, letter)
    code = next((int(each, 16) for each in codes if each), None)
    code = int(octal, 8) if code is None else code
    return chr(code) if code <= 0x10FFFF else found[0]


_NOTATION = Notation(_string, _BARE, words=False)


def write_pythonic(call: Call) -> str:
    """A list of one call, values as the templates have them, which is JSON."""
    arguments = ", ".join(f"{name}={as_json(value)}" for name, value in call.arguments.items())
    return f"[{call.name}({arguments})]"
