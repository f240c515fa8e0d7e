"""What the driver knows of each attempt of the step in progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import (
    NO_DRAFTS,
    AttemptId,
    Drafted,
    EngineId,
    FinishReason,
    PromptId,
    Sample,
)
from rollpacker.engine.base import Output
from rollpacker.reward.base import CodeRun
from rollpacker.runtime.attempts.episode_record import EpisodeRecord

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
