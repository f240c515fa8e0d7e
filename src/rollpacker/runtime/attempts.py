"""What the driver knows of each attempt of the step in progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, EngineId, PromptId, Sample
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
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _nothing() -> Mapping[str, Any]:
    return _NOTHING


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
    stays: list[tuple[EngineId, float, float]] = field(
        default_factory=list[tuple[EngineId, float, float]]
    )
    """Where it decoded before it last moved, from and to when."""
    begun: Output | None = None
    """What it was when it last moved."""
    end_s: float | None = None
    graded_s: float | None = None
    output: Output | None = None
    reward: float | None = None
    rewards: Mapping[str, float | None] = field(default_factory=_nothing)
    """Every function's score; None where it is not applicable."""
    runs: Mapping[str, CodeRun] = field(default_factory=_nothing)
    """What became of its program, by reward."""
    extra: Mapping[str, str] = field(default_factory=_nothing)
    """Columns that reward functions logged for the samples table."""
    metrics: Mapping[str, float] = field(default_factory=_nothing)
    """Numbers that reward functions logged, by metric."""
    verdict: State = "aborted"
    """Its state in the samples table; an attempt whose prompt is done without it is aborted."""

    @property
    def tokens(self) -> int:
        """Response tokens so far known."""
        return 0 if self.output is None else len(self.output.tokens)

    def move(self, engine: EngineId, now: float, begun: Output) -> None:
        """It goes on elsewhere."""
        began = self.stays[-1][2] if self.stays else self.start_s
        self.stays.append((self.engine, began, now))
        self.engine, self.target, self.begun = engine, None, begun
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
