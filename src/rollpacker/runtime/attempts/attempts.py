"""A run's prompts, and the state of each attempt of the current step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, auto
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import (
    NO_DRAFTS,
    AttemptId,
    Drafted,
    EngineId,
    FinishReason,
    Prompt,
    PromptId,
    Sample,
)
from rollpacker.data.base import Message, Row
from rollpacker.data.source import PromptStream
from rollpacker.engine.base import Output
from rollpacker.env.messages import EnvironmentAnswer
from rollpacker.reward.base import CodeRun


class Problems:
    """Rows by id, encoded, with the source that draws them.

    Args:
        rows: the problems, or a dict by id that may read them on demand.
        tokens: encoded prompt of each row, shape (P,), int32.
        source: draws each prompt once an epoch.
        chat: returns the chat messages of a row, for environments, if there are any.
    """

    def __init__(
        self,
        rows: Sequence[Row] | dict[PromptId, Row],
        tokens: Mapping[PromptId, NDArray[np.int32]],
        source: PromptStream,
        chat: Callable[[Row], list[Message]] | None = None,
    ) -> None:
        self.rows = rows if isinstance(rows, dict) else {row.id: row for row in rows}
        self.tokens = tokens
        self.source = source
        self.chat = chat

    @property
    def longest(self) -> int:
        return max(len(tokens) for tokens in self.tokens.values())

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        return tuple(self.source.draw(counts))

    def remaining(self) -> dict[str, int]:
        return dict(self.source.remaining())


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One turn of an episode.

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
    """The conversation of one attempt. Positions of tokens are counted from the response's first
    one.

    Args:
        added: start and stop of each span of tokens that the environment put in.
        calls: calls of tools, ``failed_calls`` of which failed.
        metrics: the environment's own numbers, the last of each name.
        over: ``stop`` or ``length``, after the end.
        failed: why the environment ended the episode (``environment.on_error: score``).
        changed: the environment has replaced the row's prompt.
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
        return sum(stop - start for start, stop in self.added)

    @property
    def wait_s(self) -> float:
        return sum(turn.wait_s for turn in self.turns)

    def end_turn(self, tokens: int) -> None:
        """Record a turn of the model. The response has ``tokens`` tokens now."""
        before = self.put_in + sum(turn.sampled for turn in self.turns)
        self.turns.append(TurnRecord(sampled=tokens - before))

    def take(self, answer: EnvironmentAnswer, seconds: float) -> None:
        if self.turns:
            self.turns[-1].wait_s = seconds
        if answer.reward is not None:
            self.rewards.append(answer.reward)
        self.calls += answer.calls
        self.failed_calls += answer.failed_calls
        self.metrics |= answer.metrics
        self.over = answer.over
        # In JSON's types, as logs and samples store them.
        self.messages = msgspec.to_builtins(answer.messages, str_keys=True)

    def add(self, start: int, count: int) -> None:
        """Record the answer as tokens ``start`` to ``start + count``."""
        self.turns[-1].added = count
        self.added.append((start, start + count))

    def loss_mask(self, tokens: int) -> NDArray[np.bool_]:
        """True on sampled tokens, shape (tokens,)."""
        mask = np.ones(tokens, np.bool_)
        for start, stop in self.added:
            mask[start:stop] = False
        return mask

    def reward(self, which: str) -> float | None:
        """The environment's reward by the rule ``which``. None if it gave none."""
        if not self.rewards:
            return None
        return sum(self.rewards) if which == "sum" else self.rewards[-1]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpisodeRecord:
        turns = [TurnRecord(**turn) for turn in data["turns"]]
        added = [(start, stop) for start, stop in data["added"]]
        return cls(**{**data, "turns": turns, "added": added})


def lengthened(output: Output, added: NDArray[np.int32]) -> Output:
    """Append an environment's tokens to a response. They were not sampled."""
    return Output(
        attempt=output.attempt,
        tokens=np.concatenate([output.tokens, added]),
        logprobs=np.concatenate([output.logprobs, np.zeros(len(added), np.float32)]),
        finish_reason=output.finish_reason,
        weights_version=output.weights_version,
    )


State = Literal["kept", "carried", "aborted", "dropped", "failed"]
"""``kept``: trained on. ``carried``: goes on in the next step. ``aborted``: lost its race.
``dropped``: graded, but its group was not trained on. ``failed``: the engine or the reward
failed."""

Spans = tuple[tuple[int, int], ...]
"""Versions of the weights that sampled a response, in order, each with a number of tokens."""


class TrajectoryStage(Enum):
    """The stage of an attempt."""

    RUNNING = auto()
    ACTING = auto()
    """Its environment is at work."""
    MIGRATING = auto()
    STOPPING = auto()
    GRADING = auto()
    GRADED = auto()
    OVER = auto()


DECODING = (TrajectoryStage.RUNNING, TrajectoryStage.MIGRATING)
GENERATING = (*DECODING, TrajectoryStage.ACTING)
"""The stages without a complete response."""


class _Nothing(Mapping[str, Any]):
    """An empty mapping that all attempts share: a step begins with thousands of attempts."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __hash__(self) -> int:
        """A default of a dataclass must be hashable."""
        return 0


_NOTHING = _Nothing()


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """One attempt from start to verdict. Times are seconds of the run's clock."""

    id: AttemptId
    prompt: PromptId
    index: int
    engine: EngineId
    prompt_tokens: NDArray[np.int32]
    start_s: float
    since_s: float | None
    """When it came to the engine or began its turn there. None while its environment works."""
    stage: TrajectoryStage = TrajectoryStage.RUNNING
    target: EngineId | None = None
    stays: tuple[tuple[EngineId, float, float], ...] = ()
    """Its earlier stays: engine, begin and end."""
    begun: Output | None = None
    """Its output at its last move, or at the begin of its turn."""
    conversation: EpisodeRecord | None = None
    carried: Spans = ()
    """Its tokens of earlier steps."""
    earlier: Drafted = NO_DRAFTS
    """The counts of drafts before its last move or turn."""
    end_s: float | None = None
    graded_s: float | None = None
    output: Output | None = None
    reward: float | None = None
    rewards: Mapping[str, float | None] = _NOTHING
    """Every function's score. None if a function does not apply."""
    runs: Mapping[str, CodeRun] = _NOTHING
    extra: Mapping[str, str] = _NOTHING
    """Columns of the samples table that reward functions logged."""
    metrics: Mapping[str, float] = _NOTHING
    verdict: State = "aborted"
    """Its state in the samples table. If its prompt is done without it, it is aborted."""

    @property
    def tokens(self) -> int:
        if self.output is None:
            return 0
        put_in = 0 if self.conversation is None else self.conversation.put_in
        return len(self.output.tokens) - put_in

    @property
    def stale(self) -> int:
        return sum(tokens for _, tokens in self.carried)

    def oldest(self, step: int) -> int:
        """The version of the weights that sample its first token."""
        return self.carried[0][0] if self.carried else step

    def spans(self, step: int) -> Spans:
        """The versions of all its tokens, with those of ``step`` last."""
        fresh = self.tokens - self.stale
        return (*self.carried, (step, fresh)) if fresh else self.carried

    @property
    def drafts(self) -> Drafted:
        return self.earlier if self.output is None else self.earlier.plus(self.output.drafts)

    def move(self, engine: EngineId, now: float, begun: Output) -> None:
        self._stay(now)
        self.engine, self.target, self.begun = engine, None, begun
        self.earlier = self.earlier.plus(begun.drafts)
        self.stage, self.since_s = TrajectoryStage.RUNNING, now

    def end_turn(self, now: float, output: Output) -> None:
        assert self.conversation is not None
        self._stay(now)
        self.output, self.since_s = output, None
        self.conversation.end_turn(len(output.tokens))

    def go_on(self, output: Output) -> None:
        self.earlier = self.drafts
        self.output = self.begun = output

    def whole(self, version: int) -> Output:
        """The response of an ended episode. ``version`` is for an empty one."""
        assert self.conversation is not None
        reason: FinishReason = "length" if self.conversation.over == "length" else "stop"
        if self.output is not None:
            return replace(self.output, finish_reason=reason)
        return Output(
            attempt=self.id,
            tokens=np.zeros(0, np.int32),
            logprobs=np.zeros(0, np.float32),
            finish_reason=reason,
            weights_version=version,
        )

    def _stay(self, now: float) -> None:
        if self.since_s is not None:
            self.stays = (*self.stays, (self.engine, self.since_s, now))

    def decoding(self, end: float) -> list[tuple[EngineId, float, float]]:
        if self.since_s is None:
            return list(self.stays)
        stop = end if self.end_s is None else self.end_s
        return [*self.stays, (self.engine, self.since_s, stop)]

    def sample(self) -> Sample:
        assert self.output is not None
        return Sample(
            prompt=self.prompt,
            index=self.index,
            attempt=self.id,
            prompt_tokens=self.prompt_tokens,
            tokens=self.output.tokens,
            logprobs=self.output.logprobs,
            finish_reason=self.output.finish_reason,
            weights_version=self.oldest(self.output.weights_version),
            reward=self.reward,
            rewards={name: s for name, s in self.rewards.items() if s is not None},
            loss_mask=self.loss_mask(),
        )

    def loss_mask(self) -> NDArray[np.bool_] | None:
        if self.conversation is None or not self.conversation.added or self.output is None:
            return None
        return self.conversation.loss_mask(len(self.output.tokens))
