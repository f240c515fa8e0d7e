"""What an attempt and its environment have said to each other so far, in tokens and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollpacker.engine.base import Output
from rollpacker.env.messages import EnvironmentAnswer


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One turn.

    Args:
        sampled: tokens of the model's reply.
        wait_s: seconds until the environment had answered.
        added: tokens of its answer.
    """

    sampled: int
    wait_s: float = 0.0
    added: int = 0


@dataclass(slots=True, kw_only=True)
class EpisodeRecord:
    """Of one attempt; tokens are counted from the response's first one.

    Args:
        turns: that the model has ended.
        added: spans of tokens that the environment put in, start and stop.
        rewards: that its turns gave, in order.
        calls: of tools.
        failed_calls: of them.
        metrics: numbers of the environment's own, the last of each name.
        messages: the whole of it, once the episode is over.
        over: ``stop`` or ``length``, once it is.
        failed: why the environment ended it (``environment.on_error: score``).
        changed: the environment has put another prompt in the row's place.
    """

    turns: list[TurnRecord] = field(default_factory=list[TurnRecord])
    added: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    rewards: list[float] = field(default_factory=list[float])
    calls: int = 0
    failed_calls: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    over: str = ""
    failed: str = ""
    changed: bool = False

    @property
    def put_in(self) -> int:
        """Tokens of the environment's."""
        return sum(stop - start for start, stop in self.added)

    @property
    def wait_s(self) -> float:
        """Seconds in which the environment was waited for."""
        return sum(turn.wait_s for turn in self.turns)

    def end_turn(self, tokens: int) -> None:
        """The model has ended a turn: the response has so many tokens now."""
        before = self.put_in + sum(turn.sampled for turn in self.turns)
        self.turns.append(TurnRecord(sampled=tokens - before))

    def take(self, answer: EnvironmentAnswer, seconds: float) -> None:
        """The environment has answered, after so many seconds for the driver."""
        if self.turns:
            self.turns[-1].wait_s = seconds
        if answer.reward is not None:
            self.rewards.append(answer.reward)
        self.calls += answer.calls
        self.failed_calls += answer.failed_calls
        self.metrics |= answer.metrics
        self.over = answer.over
        # As JSON has them: logs and samples keep them so.
        self.messages = msgspec.to_builtins(answer.messages, str_keys=True)

    def add(self, start: int, count: int) -> None:
        """Its answer takes the place of tokens ``start`` to ``start + count``."""
        self.turns[-1].added = count
        self.added.append((start, start + count))

    def loss_mask(self, tokens: int) -> NDArray[np.bool_]:
        """True on what was sampled, shape (tokens,)."""
        mask = np.ones(tokens, np.bool_)
        for start, stop in self.added:
            mask[start:stop] = False
        return mask

    def reward(self, which: str) -> float | None:
        """The environment's, as ``environment.reward`` says; None where it gave none."""
        if not self.rewards:
            return None
        return sum(self.rewards) if which == "sum" else self.rewards[-1]

    def to_json(self) -> dict[str, Any]:
        """For the log of graded responses."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpisodeRecord:
        turns = [TurnRecord(**turn) for turn in data["turns"]]
        added = [(start, stop) for start, stop in data["added"]]
        return cls(**{**data, "turns": turns, "added": added})


def lengthened(output: Output, added: NDArray[np.int32]) -> Output:
    """A response with an environment's tokens behind it: they were not sampled."""
    return Output(
        attempt=output.attempt,
        tokens=np.concatenate([output.tokens, added]),
        logprobs=np.concatenate([output.logprobs, np.zeros(len(added), np.float32)]),
        finish_reason=output.finish_reason,
        weights_version=output.weights_version,
    )
