"""What the driver knows of each attempt of the step in progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, AttemptId, Drafted, EngineId, PromptId, Sample
from rollpacker.engine.base import Output
from rollpacker.reward.base import CodeRun
from rollpacker.runtime.samples import State


class Stage(Enum):
    """Where an attempt is."""

    RUNNING = auto()
    MIGRATING = auto()
    STOPPING = auto()
    GRADING = auto()
    GRADED = auto()
    OVER = auto()


DECODING = (Stage.RUNNING, Stage.MIGRATING)


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


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt from start to verdict. Times are seconds of the run's clock."""

    id: AttemptId
    prompt: PromptId
    index: int
    engine: EngineId
    prompt_tokens: NDArray[np.int32]
    start_s: float
    stage: Stage = Stage.RUNNING
    target: EngineId | None = None
    """Where a migrating attempt goes."""
    stays: tuple[tuple[EngineId, float, float], ...] = ()
    """Where it decoded before it last moved, from and to when."""
    begun: Output | None = None
    """What it was when it last moved."""
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
        """Response tokens so far known."""
        return 0 if self.output is None else len(self.output.tokens)

    @property
    def drafts(self) -> Drafted:
        """What they brought on all its engines."""
        return self.earlier if self.output is None else self.earlier.plus(self.output.drafts)

    def move(self, engine: EngineId, now: float, begun: Output) -> None:
        """It goes on elsewhere."""
        began = self.stays[-1][2] if self.stays else self.start_s
        self.stays = (*self.stays, (self.engine, began, now))
        self.engine, self.target, self.begun = engine, None, begun
        self.earlier = self.earlier.plus(begun.drafts)
        self.stage = Stage.RUNNING

    def decoding(self, end: float) -> list[tuple[EngineId, float, float]]:
        """Where and when it decoded, until ``end`` at the latest."""
        began = self.stays[-1][2] if self.stays else self.start_s
        stop = end if self.end_s is None else self.end_s
        return [*self.stays, (self.engine, began, stop)]

    def sample(self) -> Sample:
        """The finished, graded response."""
        assert self.output is not None
        return Sample(
            prompt=self.prompt,
            index=self.index,
            attempt=self.id,
            prompt_tokens=self.prompt_tokens,
            tokens=self.output.tokens,
            logprobs=self.output.logprobs,
            finish_reason=self.output.finish_reason,
            weights_version=self.output.weights_version,
            reward=self.reward,
            rewards={name: s for name, s in self.rewards.items() if s is not None},
        )
