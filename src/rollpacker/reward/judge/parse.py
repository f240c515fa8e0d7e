"""From the judge's text to a score in [0, 1], or None: then the text holds no grade."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

Parser = Callable[[str], float | None]

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_BRACKETS = re.compile(rf"\[\[\s*({_NUMBER})\s*\]\]")
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_FIRST_WORD = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)


def make_parser(name: str, low: float = 0.0, high: float = 10.0) -> Parser:
    """The parser that an option names; ``low`` becomes 0 and ``high`` 1.

    Raises ``ValueError`` for an unknown name or an unusable pattern.
    """
    kind, _, argument = name.partition(":")
    if name == "yes_no":
        return yes_no
    if name == "brackets":
        return lambda text: _last_number(_BRACKETS, text, low, high)
    if kind == "json" and argument:
        return lambda text: json_field(text, argument, low, high)
    if kind == "regex" and argument:
        pattern = _compiled(argument)
        return lambda text: _last_number(pattern, text, low, high)
    raise ValueError(
        f"judge: unknown parser '{name}'; known: yes_no, brackets, json:FIELD, regex:PATTERN"
    )


def yes_no(text: str) -> float | None:
    """1 for yes, 0 for no: the first word, or else the only one of the two that occurs."""
    first = _FIRST_WORD.match(text)
    found = {first.group(1).lower()} if first else {v.lower() for v in _VERDICT.findall(text)}
    return float(found == {"yes"}) if len(found) == 1 else None


def json_field(text: str, field: str, low: float, high: float) -> float | None:
    """The number or boolean in a field of the last JSON object of the text that has it."""
    decoder = json.JSONDecoder()
    end = len(text)
    while (start := text.rfind("{", 0, end)) >= 0:
        end = start
        try:
            value, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if field in value:
            return _json_score(value[field], low, high)
    return None


def _json_score(value: object, low: float, high: float) -> float | None:
    if isinstance(value, bool):
        return float(value)
    return _scaled(value, low, high) if isinstance(value, int | float) else None


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"judge: parser is no regular expression: {error}") from None
    if compiled.groups != 1:
        raise ValueError(
            f"judge: parser 'regex:{pattern}' needs one group, around the number; "
            f"it has {compiled.groups}"
        )
    return compiled


def _last_number(pattern: re.Pattern[str], text: str, low: float, high: float) -> float | None:
    found = pattern.findall(text)
    try:
        return _scaled(float(found[-1]), low, high) if found else None
    except ValueError:
        return None


def _scaled(value: float, low: float, high: float) -> float | None:
    # A number outside of the range is no grade; clipping would make it one.
    if not low <= value <= high:
        return None
    return (value - low) / (high - low)
