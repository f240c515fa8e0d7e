"""Values in a notation that is not JSON: Python's literals, or those of Gemma's own calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollpacker.env.calls.formats.scan import skip

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
    """What is no value; one line for the model."""


class TooDeepError(LiteralError):
    """A value is nested deeper than anybody means it to be."""


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written.

    Args:
        string: the text that begins at a place, and where it ends; None where none does. Raises
            ``LiteralError``.
        bare: what a word without quotes may be.
        words: whether such a word is text, if it is nothing else.
        pair: between a name and its value, inside of an object.
    """

    string: Callable[[str, int], tuple[str, int] | None]
    bare: re.Pattern[str]
    words: bool
    pair: str = ":"

    def named(
        self, text: str, place: int, close: str, pair: str, depth: int = 0
    ) -> tuple[dict[str, Any], int]:
        """Values with names, up to ``close``, and where that ends. Raises ``LiteralError``."""
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
        """The value at a place, and where it ends. Raises ``LiteralError``."""
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
        """Where the next one begins, or ``close`` is."""
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
