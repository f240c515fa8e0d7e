"""What the driver and the processes of environments say to each other.

Both directions are MessagePack: what such a process writes, in which a user's code runs, is checked
and never unpickled. A row goes there pickled, since its columns may be anything.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from rollpacker.errors import one_line

_MOST = 1 << 31
_METRICS = 1000
"""Names of a turn's."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode. ``row``: of ``packed``; ``prompt``: its chat messages; ``template``: its
    own arguments of the chat template; ``room``: most tokens of a prompt in its place."""

    episode: int
    row: bytes
    prompt: Any
    tools: Any
    room: int
    template: dict[str, Any] = {}


def packed(row: Mapping[str, Any]) -> bytes:
    """A row for ``Begin``. Raises ``ValueError`` that names the column that cannot be sent."""
    try:
        return pickle.dumps(dict(row), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever a value's own code raises
        name = next((name for name, value in row.items() if not _sent(value)), "?")
        kind = type(row.get(name)).__name__
        raise ValueError(
            f"data: column '{name}' cannot be sent to the process of an environment: pickling its "
            f"{kind} failed: {one_line(error)}"
        ) from error


def _sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


class ModelReplied(msgspec.Struct, frozen=True, tag=True):
    """The model has replied: ``reply`` token ids, int32 in native order.

    ``left`` and ``left_sampled``: tokens that the conversation, and what the model samples, may
    still have. ``cut``: the reply is not complete, and the episode is over.
    """

    episode: int
    reply: bytes
    left: int
    left_sampled: int
    cut: bool = False


class Close(msgspec.Struct, frozen=True, tag=True):
    """An episode was given up; nothing is answered."""

    episode: int


Command = Begin | ModelReplied | Close


class EnvironmentReady(msgspec.Struct, frozen=True, tag=True):
    """The process has loaded its environment, or goes on with it; ``warnings`` for the user."""

    warnings: list[str] = []
    tools: list[dict[str, Any]] = []


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """It cannot be loaded, or is broken: no process can go on with it."""

    error: str


class EnvironmentAnswer(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """What an environment answered.

    Args:
        episode: of which.
        tokens: that come behind the reply (or, at its beginning, behind the prompt), int32.
        prompt: at its beginning: token ids in place of the prompt's.
        over: ``stop`` or ``length`` where the episode is over; empty where it goes on.
        error: the environment failed, and how; the episode is over.
        seconds: that the environment took.
        reward: of the turn.
        calls: of tools in the reply.
        failed_calls: of them.
        metrics: numbers of the turn.
        messages: the whole conversation behind the prompt, where the episode is over.
    """

    episode: int
    tokens: bytes = b""
    prompt: bytes = b""
    over: Literal["", "stop", "length"] = ""
    error: str = ""
    seconds: float = 0.0
    reward: float | None = None
    calls: int = 0
    failed_calls: int = 0
    metrics: dict[str, float] = {}
    messages: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        """Raises ``ValueError``, where it is made as where it is read."""
        if len(self.tokens) % 4 or len(self.prompt) % 4:
            raise ValueError("token ids are 4 bytes each")
        if not (0 <= self.seconds < math.inf and math.isfinite(self.reward or 0.0)):
            raise ValueError("seconds and a reward are finite")
        if not (0 <= self.calls <= _MOST and 0 <= self.failed_calls <= _MOST):
            raise ValueError(f"calls of a turn are 0 to {_MOST}")
        if len(self.metrics) > _METRICS:
            raise ValueError(f"a turn has {len(self.metrics)} metrics, more than {_METRICS}")


Report = EnvironmentReady | Fatal | EnvironmentAnswer
