"""Calls as FunctionGemma and Gemma 4 write them: a notation of their own between tokens.

Text stands between two of one token, all else as it is; names stand alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollpacker.env.calls.call import BadCall, Call, Parsed, call_of, deep
from rollpacker.env.calls.formats.literals import LiteralError, Notation, TooDeepError
from rollpacker.env.calls.formats.scan import Calls, as_json, between, skip

_HEAD = re.compile(r"\s*call:\s*([^\s{}<>,:]+)\s*\{")
_BARE = re.compile(r"[^,:{}\[\]<]+")


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a family: of a call, and on both sides of text."""

    open: str
    close: str
    quote: str

    def string(self, text: str, place: int) -> tuple[str, int] | None:
        """The text at a place."""
        if not text.startswith(self.quote, place):
            return None
        begin = place + len(self.quote)
        end = text.find(self.quote, begin)
        if end < 0:
            raise LiteralError(f"text has no end: {self.quote} is missing")
        return text[begin:end], end + len(self.quote)

    def next(self, text: str, start: int) -> int:
        """Where text goes on behind a call that was not understood."""
        tag = re.compile(f"{re.escape(self.open)}|{re.escape(self.close)}").search(text, start)
        if tag is None:
            return len(text)
        return tag.end() if tag[0] == self.close else tag.start()


_FUNCTIONGEMMA = _Tokens("<start_function_call>", "<end_function_call>", "<escape>")
_GEMMA4 = _Tokens("<|tool_call>", "<tool_call|>", '<|"|>')


def functiongemma(text: str, start: int) -> Parsed:
    """With the tokens of FunctionGemma."""
    return _parsed(text, start, _FUNCTIONGEMMA)


def gemma4(text: str, start: int) -> Parsed:
    """With those of Gemma 4."""
    return _parsed(text, start, _GEMMA4)


def _parsed(text: str, start: int, tokens: _Tokens) -> Parsed:
    begins = re.compile(re.escape(tokens.open))
    return between(text, start, begins, partial(_read, tokens=tokens))


def _read(text: str, start: int, tokens: _Tokens) -> tuple[Calls, int]:
    head = _HEAD.match(text, start)
    if head is None:
        return (BadCall("the call must be call:NAME{...}"),), tokens.next(text, start)
    try:
        notation = Notation(tokens.string, _BARE, words=True)
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


def write_functiongemma(call: Call) -> str:
    """A call as the template of FunctionGemma has it."""
    return _written(call, _FUNCTIONGEMMA)


def write_gemma4(call: Call) -> str:
    """A call as the template of Gemma 4 has it."""
    return _written(call, _GEMMA4)


def _written(call: Call, tokens: _Tokens) -> str:
    return f"{tokens.open}call:{call.name}{_value(call.arguments, tokens.quote)}{tokens.close}"


def _value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(_value(each, quote) for each in value)}]"
    if isinstance(value, dict):
        names = sorted(value, key=str.lower)
        return f"{{{','.join(f'{name}:{_value(value[name], quote)}' for name in names)}}}"
    return as_json(value)
