"""What the driver knows of a run's prompts, and of each attempt of the step in progress."""

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
        rows: the problems; by id already where they are read when they are asked for.
        tokens: encoded prompt of each row, shape (P,), int32.
        source: draws each prompt once an epoch.
        chat: the chat messages of a row, for environments; None where there are none.
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
        """Tokens of the longest prompt."""
        return max(len(tokens) for tokens in self.tokens.values())

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        return tuple(self.source.draw(counts))

    def remaining(self) -> dict[str, int]:
        """Fresh prompts of each domain left in this epoch."""
        return dict(self.source.remaining())


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


State = Literal["kept", "carried", "aborted", "dropped", "failed"]
"""``kept``: trained on; ``carried``: goes on in the next step; ``aborted``: lost its race;
``dropped``: graded, its group not trained on; ``failed``: the engine or the reward failed on it."""

Spans = tuple[tuple[int, int], ...]
"""Versions of the weights that sampled a response, in order, each with a number of tokens."""


class TrajectoryStage(Enum):
    """Where an attempt is."""

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
"""Of those whose response is not there yet."""


class _Nothing(Mapping[str, Any]):
    """Empty, and the same for all attempts: a step begins with thousands of them."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __hash__(self) -> int:
        """Which a default must have."""
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
    """When it came to the engine, or began its turn there; None while its environment is at work.
    """
    stage: TrajectoryStage = TrajectoryStage.RUNNING
    target: EngineId | None = None
    """Where a migrating attempt goes."""
    stays: tuple[tuple[EngineId, float, float], ...] = ()
    """Where it decoded before it last moved, from and to when."""
    begun: Output | None = None
    """What it was when it last moved, or when its turn began."""
    conversation: EpisodeRecord | None = None
    """With its environment, if it has one."""
    carried: Spans = ()
    """Its tokens of earlier steps."""
    earlier: Drafted = NO_DRAFTS
    """What drafts brought before."""
    end_s: float | None = None
    graded_s: float | None = None
    output: Output | None = None
    reward: float | None = None
    rewards: Mapping[str, float | None] = _NOTHING
    """Every function's score; None where it is not applicable."""
    runs: Mapping[str, CodeRun] = _NOTHING
    """What became of its program, by reward."""
    extra: Mapping[str, str] = _NOTHING
    """Columns that reward functions logged for the samples table."""
    metrics: Mapping[str, float] = _NOTHING
    """Numbers that reward functions logged, by metric."""
    verdict: State = "aborted"
    """Its state in the samples table; an attempt whose prompt is done without it is aborted."""

    @property
    def tokens(self) -> int:
        """Sampled tokens so far known."""
        if self.output is None:
            return 0
        put_in = 0 if self.conversation is None else self.conversation.put_in
        return len(self.output.tokens) - put_in

    @property
    def stale(self) -> int:
        """Tokens of earlier steps."""
        return sum(tokens for _, tokens in self.carried)

    def oldest(self, step: int) -> int:
        """Version of the weights that sampled its first token, or will in this step."""
        return self.carried[0][0] if self.carried else step

    def spans(self, step: int) -> Spans:
        """Of all its tokens, those of ``step`` last."""
        fresh = self.tokens - self.stale
        return (*self.carried, (step, fresh)) if fresh else self.carried

    @property
    def drafts(self) -> Drafted:
        """What they brought on all its engines."""
        return self.earlier if self.output is None else self.earlier.plus(self.output.drafts)

    def move(self, engine: EngineId, now: float, begun: Output) -> None:
        self._stay(now)
        self.engine, self.target, self.begun = engine, None, begun
        self.earlier = self.earlier.plus(begun.drafts)
        self.stage, self.since_s = TrajectoryStage.RUNNING, now

    def end_turn(self, now: float, output: Output) -> None:
        """It has ended a turn."""
        assert self.conversation is not None
        self._stay(now)
        self.output, self.since_s = output, None
        self.conversation.end_turn(len(output.tokens))

    def go_on(self, output: Output) -> None:
        """Its environment has answered: so it begins its next turn."""
        self.earlier = self.drafts
        self.output = self.begun = output

    def whole(self, version: int) -> Output:
        """The response of an episode that is over, of weights of that version."""
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
        """It decoded where it is until now."""
        if self.since_s is not None:
            self.stays = (*self.stays, (self.engine, self.since_s, now))

    def decoding(self, end: float) -> list[tuple[EngineId, float, float]]:
        """Where and when it decoded, until ``end`` at the latest."""
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
        """True on what was sampled; None: all of it."""
        if self.conversation is None or not self.conversation.added or self.output is None:
            return None
        return self.conversation.loss_mask(len(self.output.tokens))
