"""What the driver and the processes of environments say to each other.

Both directions are MessagePack: what such a process writes, in which a user's code runs, is checked
and never unpickled.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode. ``prompt``: the row's chat messages; ``template``: its own arguments of the
    chat template; ``room``: most tokens of a prompt in its place."""

    episode: int
    row: Any
    prompt: Any
    tools: Any
    room: int
    template: dict[str, Any] = {}


class Step(msgspec.Struct, frozen=True, tag=True):
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


Command = Begin | Step | Close


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has loaded its environment; ``warnings`` for the user."""

    warnings: list[str] = []
    tools: list[dict[str, Any]] = []


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """It cannot be loaded."""

    error: str


class Answer(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
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
    over: str = ""
    error: str = ""
    seconds: float = 0.0
    reward: float | None = None
    calls: int = 0
    failed_calls: int = 0
    metrics: dict[str, float] = {}
    messages: list[dict[str, Any]] = []


Report = Ready | Fatal | Answer
