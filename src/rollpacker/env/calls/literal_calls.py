"""Calls whose arguments are not JSON: those of FunctionGemma, Gemma 4 and Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollpacker.env.calls.call import BadCall, Call, Calls, Parsed, between, call_of, deep, skip

_DEEPEST = 64
_NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?\Z")
_WORDS = {
    "true": True,
    "True": True,
    "false": False,
    "False": False,
    "null": None,
    "None": None,
    "none": None,
}
_CLOSES = {"[": "]", "(": ")"}


class LiteralError(ValueError):
    """Text is no value. The message is one line for the model."""


class TooDeepError(LiteralError):
    """A value is nested too deep."""


@dataclass(frozen=True, slots=True)
class Notation:
    """A notation of values.

    Args:
        string: returns the text at a place and its end, or None. Raises ``LiteralError``.
        bare: matches a word without quotes.
        words: whether a word that is nothing else is text.
        pair: between a name and its value, inside of an object.
    """

    string: Callable[[str, int], tuple[str, int] | None]
    bare: re.Pattern[str]
    words: bool
    pair: str = ":"

    def named(
        self, text: str, place: int, close: str, pair: str, depth: int = 0
    ) -> tuple[dict[str, Any], int]:
        """Read named values up to ``close``, and return them and the place after it. Raises
        ``LiteralError``."""
        found: dict[str, Any] = {}
        place = skip(text, place)
        while not text.startswith(close, place):
            name, place = self._name(text, place)
            place = skip(text, place)
            if not text.startswith(pair, place):
                raise LiteralError(f"{name!r:.100} is not followed by {pair} and a value")
            found[name], place = self.value(text, place + len(pair), depth)
            place = self._next(text, place, close)
        return found, place + len(close)

    def value(self, text: str, place: int, depth: int = 0) -> tuple[Any, int]:
        """Read the value at a place, and return it and its end. Raises ``LiteralError``."""
        if depth > _DEEPEST:
            raise TooDeepError("nested too deep")
        place = skip(text, place)
        if (string := self.string(text, place)) is not None:
            return string
        opening = text[place : place + 1]
        if opening in _CLOSES:
            return self._items(text, place + 1, _CLOSES[opening], depth)
        if opening == "{":
            return self.named(text, place + 1, "}", self.pair, depth + 1)
        return self._word(text, place)

    def _items(self, text: str, place: int, close: str, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        place = skip(text, place)
        while not text.startswith(close, place):
            item, place = self.value(text, place, depth + 1)
            items.append(item)
            place = self._next(text, place, close)
        return items, place + len(close)

    def _next(self, text: str, place: int, close: str) -> int:
        place = skip(text, place)
        if text.startswith(",", place):
            return skip(text, place + 1)
        if text.startswith(close, place):
            return place
        what = "the end of the reply" if place == len(text) else f"{text[place : place + 20]!r}"
        raise LiteralError(f"expected , or {close} before {what}")

    def _name(self, text: str, place: int) -> tuple[str, int]:
        if (string := self.string(text, place)) is not None:
            return string
        word = self.bare.match(text, place)
        if word is None:
            raise LiteralError(f"expected a name before {text[place : place + 20]!r}")
        return word[0].strip(), word.end()

    def _word(self, text: str, place: int) -> tuple[Any, int]:
        word = self.bare.match(text, place)
        if word is None:
            raise LiteralError(f"expected a value before {text[place : place + 20]!r}")
        said = word[0].strip()
        if said in _WORDS:
            return _WORDS[said], word.end()
        if _NUMBER.match(said):
            return _number(said), word.end()
        if self.words:
            return said, word.end()
        raise LiteralError(f"{said!r:.100} is no value: text stands in quotes")


def _number(said: str) -> int | float:
    try:
        return int(said) if said.lstrip("+-").isdecimal() else float(said)
    except ValueError:
        raise LiteralError("a number is too long") from None


# FunctionGemma and Gemma 4: a text stands between two equal tokens, other values stand alone.

_GEMMA_HEAD = re.compile(r"\s*call:\s*([^\s{}<>,:]+)\s*\{")
_GEMMA_BARE = re.compile(r"[^,:{}\[\]<]+")


@dataclass(frozen=True, slots=True)
class _Tokens:
    open: str
    close: str
    quote: str

    def string(self, text: str, place: int) -> tuple[str, int] | None:
        if not text.startswith(self.quote, place):
            return None
        begin = place + len(self.quote)
        end = text.find(self.quote, begin)
        if end < 0:
            raise LiteralError(f"text has no end: {self.quote} is missing")
        return text[begin:end], end + len(self.quote)

    def next(self, text: str, start: int) -> int:
        tag = re.compile(f"{re.escape(self.open)}|{re.escape(self.close)}").search(text, start)
        if tag is None:
            return len(text)
        return tag.end() if tag[0] == self.close else tag.start()


_FUNCTIONGEMMA = _Tokens("<start_function_call>", "<end_function_call>", "<escape>")
_GEMMA4 = _Tokens("<|tool_call>", "<tool_call|>", '<|"|>')


def functiongemma(text: str, start: int) -> Parsed:
    """Parse calls in FunctionGemma's tokens."""
    return _gemma_parsed(text, start, _FUNCTIONGEMMA)


def gemma4(text: str, start: int) -> Parsed:
    """Parse calls in Gemma 4's tokens."""
    return _gemma_parsed(text, start, _GEMMA4)


def _gemma_parsed(text: str, start: int, tokens: _Tokens) -> Parsed:
    begins = re.compile(re.escape(tokens.open))
    return between(text, start, begins, partial(_gemma_read, tokens=tokens))


def _gemma_read(text: str, start: int, tokens: _Tokens) -> tuple[Calls, int]:
    head = _GEMMA_HEAD.match(text, start)
    if head is None:
        return (BadCall("the call must be call:NAME{...}"),), tokens.next(text, start)
    try:
        notation = Notation(tokens.string, _GEMMA_BARE, words=True)
        arguments, end = notation.named(text, head.end(), "}", ":")
    except TooDeepError:
        return (BadCall(deep(head[1]), head[1]),), tokens.next(text, start)
    except LiteralError as error:
        bad = BadCall(f"the call is not well-formed: {error}", head[1])
        return (bad,), tokens.next(text, start)
    place = skip(text, end)
    if text.startswith(tokens.close, place):
        end = place + len(tokens.close)
    elif place != len(text) and not text.startswith(tokens.open, place):
        bad = BadCall("there is text behind the } of the call", head[1])
        return (bad,), tokens.next(text, end)
    return (call_of(head[1], arguments),), end


# Python: a list of calls that is all of a reply, or a block of ``tool_code``. Gemma 3's
# documentation asks the model for these. Nothing is run.

_LIST = re.compile(r"\[\s*(?=[A-Za-z_][\w.]*\()")
_BLOCK = re.compile(r"```tool_code[^\S\n]*\n?")
_FENCE = re.compile(r"```(?:python)?[^\S\n]*\n?")
_FENCE_END = re.compile(r"\s*(?:```|\Z)")
_PYTHON_HEAD = re.compile(r"([A-Za-z_][\w.]*)\s*\(")
_PYTHON_BARE = re.compile(r"[^\s,:=()\[\]{}\"'`]+")
_QUOTES = re.compile(r"([rRbBuUfF]?)(\"\"\"|'''|\"|')")
_ESCAPE = re.compile(
    r"\\(?:(\n)|([\\'\"abfnrtv])|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})"
    r"|([0-7]{1,3}))"
)
_LETTERS = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def pythonic(text: str, start: int) -> Parsed:
    """Parse a list of calls, or blocks of them."""
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
    head = _PYTHON_HEAD.match(text, place)
    if head is None:
        return BadCall("a call must be NAME(argument=value, ...)"), place
    try:
        arguments, end = _NOTATION.named(text, head.end(), ")", "=")
    except TooDeepError:
        return BadCall(deep(head[1]), head[1]), place
    except LiteralError as error:
        wrong = f"the call of {head[1]} is not Python like NAME(argument=value, ...): {error}"
        return BadCall(wrong, head[1]), place
    return call_of(head[1], arguments), end


def _string(text: str, place: int) -> tuple[str, int] | None:
    # A text in any quotes may span lines, since models forget to escape them.
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
    first = place
    while first > begin and text[first - 1] == "\\":
        first -= 1
    return (place - first) % 2 == 1


def _unescaped(body: str) -> str:
    # As in Python and JSON, two halves of a character become one.
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


_NOTATION = Notation(_string, _PYTHON_BARE, words=False)
