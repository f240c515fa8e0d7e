"""What an emulated worker and its driver say besides what all workers say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rollpacker.emulate.agenda import Lateness
from rollpacker.engine.base import Request
from rollpacker.runtime.messages import messages as msg


class Draw(NamedTuple):
    """Which prompt of the workload a prompt stands for.

    Args:
        number: of its draw.
        visits: steps that have sampled it before.
        domain: its task domain.
    """

    number: int
    visits: int
    domain: str


@dataclass(frozen=True, kw_only=True)
class Forced(msg.Submit):
    """Sample these, with the lengths of the prompts that they stand for."""

    draws: tuple[Draw, ...]


@dataclass(frozen=True, kw_only=True)
class Punctual(msg.Beat):
    """A sign of life with how late actions of this process ran, since it began.

    ``process`` is the number of its first worker.
    """

    process: int
    lateness: Lateness


def forced(command: msg.Submit, draws: tuple[Draw, ...]) -> Forced:
    """``command`` with what its requests stand for."""
    requests: list[Request] = list(command.requests)
    return Forced(requests=requests, draws=draws)
