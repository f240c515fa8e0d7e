"""What an episode was worth: how its program ended, and the last thing that it printed."""

from __future__ import annotations

import ast
import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from rollpacker.env.agent.program import Ending
from rollpacker.env.base import EpisodeError
from rollpacker.env.calls.values import number

_KEYS = ("reward", "score")
_LONGEST = 10_000
"""Bytes of a line that is read as Python."""
_LAST_LINES = 3
_SHOWN = 300
"""Characters of them."""


def verdict(ending: Ending, name: str) -> tuple[float | None, dict[str, float]]:
    """The reward that a program printed, None where it printed none, and its other numbers by name.

    That is the last line of its output which is JSON: an object with ``reward`` (or ``score``), or
    a number; a function returns the same. Raises ``EpisodeError`` where it failed, or where what
    was meant as a reward is no finite number; ``name`` is its.
    """
    if ending.code:
        said = _last_lines(ending.stderr)
        raise EpisodeError(f"{name} {ending.how}{f': {said}' if said else ''}")
    if ending.result is not None:
        return _worth(ending.result, f"{name}: it returned {type(ending.result).__name__},")
    said = _printed(ending.stdout)
    return (None, {}) if said is None else _worth(said, f"{name} printed")


def _worth(said: Any, whose: str) -> tuple[float | None, dict[str, float]]:
    """Raises ``EpisodeError``."""
    if not isinstance(said, Mapping):
        return _reward(said, whose), {}
    key = _key(said)
    if key is None:
        raise EpisodeError(
            f"{whose} no reward: its keys are {', '.join(map(repr, said)):.200}, and none of them "
            "is 'reward'"
        )
    numbers = {str(name): number(value) for name, value in said.items() if name != key}
    finite = {name: value for name, value in numbers.items() if value is not None}
    return _reward(said[key], whose), finite


def _key(said: Mapping[Any, Any]) -> str | None:
    return next((key for key in _KEYS if key in said), None)


def _reward(said: Any, whose: str) -> float | None:
    reward = number(said)
    if said is not None and reward is None:
        raise EpisodeError(f"{whose} a reward that is no finite number: {said!r:.40}")
    return reward


def _printed(text: bytes) -> Any:
    """What a program printed as its reward; None where it meant none."""
    lines = [line for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        said = _decoded(line)
        if isinstance(said, dict) and _key(said) is not None:
            return said
        if isinstance(said, int | float) and not isinstance(said, bool):
            return said
    return _meant(lines[-1]) if lines else None


def _meant(line: bytes) -> Any:
    """The last line where it looks like a reward, as JSON or as Python writes it."""
    said = _decoded(line)
    if said is None and len(line) <= _LONGEST:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            said = ast.literal_eval(line.decode())
    first = said[0] if isinstance(said, list | tuple) and said else said
    if isinstance(first, Mapping):
        return said if _key(first) is not None else None
    if isinstance(first, str):
        with contextlib.suppress(ValueError):
            return said if math.isfinite(float(first)) else None
        return None
    return said if isinstance(first, int | float) else None


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _last_lines(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LAST_LINES:])[-_SHOWN:]
