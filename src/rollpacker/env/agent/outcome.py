"""What an episode was worth: how its program ended, and the last thing that it printed."""

from __future__ import annotations

import json
import math
from typing import Any

from rollpacker.env.agent.program import Ending
from rollpacker.env.base import EpisodeError

_LAST_LINES = 3
_SHOWN = 300
"""Characters of them."""


def verdict(ending: Ending, name: str) -> tuple[float | None, dict[str, float]]:
    """The reward that a program printed, None where it printed none, and its other numbers by name.

    That is the last line of its output which is JSON: an object with ``reward``, or a number.
    Raises ``EpisodeError`` where it failed, or its reward is no finite number; ``name`` is its.
    """
    if ending.code:
        said = _last_lines(ending.stderr)
        raise EpisodeError(f"{name} {ending.how}{f': {said}' if said else ''}")
    for line in reversed(ending.stdout.splitlines()):
        said = _decoded(line)
        if isinstance(said, dict) and "reward" in said:
            numbers = {key: _number(value) for key, value in said.items() if key != "reward"}
            finite = {key: value for key, value in numbers.items() if value is not None}
            return _reward(said["reward"], name), finite
        if isinstance(said, int | float) and not isinstance(said, bool):
            return _reward(said, name), {}
    return None, {}


def _decoded(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _reward(said: Any, name: str) -> float | None:
    number = _number(said)
    if said is not None and number is None:
        raise EpisodeError(f"{name} printed a reward that is no finite number: {said!r:.40}")
    return number


def _number(said: Any) -> float | None:
    if not isinstance(said, int | float):
        return None
    try:
        number = float(said)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _last_lines(text: bytes) -> str:
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LAST_LINES:])[-_SHOWN:]
