"""What a simulated engine decodes: requests, and how far they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

ToolKv = Literal["cached", "kept", "dropped"]
"""What becomes of a response's KV while it waits for tools: ``cached`` as in vLLM (the request has
ended; its blocks can be found again until others need them, least recently used first), ``kept``
(the same, but nothing is admitted in their place), ``dropped``."""


class SimulatedRequest(NamedTuple):
    """One turn of an attempt: ``target_tokens``, ``generated`` of them elsewhere (it migrated).

    Its context begins with the prompt, whose prefill the requests of a ``group`` share while one
    of them is held, and ``earlier`` tokens of turns and tools. ``returns``: a turn follows, which
    may find this one's KV.
    """

    attempt: int
    group: str
    prompt_tokens: int
    target_tokens: int
    generated: int = 0
    earlier: int = 0
    returns: bool = False


@dataclass(slots=True, eq=False)
class Live:
    """A held request; ``start`` is the step count at which it would have had no token."""

    attempt: int
    group: str
    shared: int
    prompt: int
    returns: bool
    target: int
    generated: int
    start: int = 0
    ticket: int = -1
    gone: bool = False
