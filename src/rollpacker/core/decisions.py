"""Decisions are imperatives. Policies make them, and drivers perform them without waiting."""

from __future__ import annotations

from rollpacker.core.codec import Tagged
from rollpacker.core.types import (
    AttemptId,
    EngineId,
    GroupPart,
    Prompt,
    PromptId,
    ReplicaId,
    RoundKind,
)


class DrawPrompts(Tagged, frozen=True, kw_only=True):
    """Take up to ``counts[domain]`` fresh prompts of each domain. Answered by ``PromptsDrawn``."""

    counts: dict[str, int]


class BeginRound(Tagged, frozen=True, kw_only=True):
    """The kind of this step's round, before its first attempt. ``updates``: the round runs so many
    steps' prompts, with an update for each step."""

    step: int
    round: RoundKind
    updates: int = 1


class StartAttempt(Tagged, frozen=True, kw_only=True):
    """Sample response ``index`` of ``prompt`` on ``engine``."""

    attempt: AttemptId
    prompt: PromptId
    index: int
    engine: EngineId


class StepEnvironment(Tagged, frozen=True, kw_only=True):
    """Give a finished turn to the attempt's environment. Answered by ``EnvironmentReplied``, or by
    ``AttemptFinished`` if that ends the episode."""

    attempt: AttemptId


class ContinueAttempt(Tagged, frozen=True, kw_only=True):
    """Sample the next turn of an attempt on ``engine``."""

    attempt: AttemptId
    engine: EngineId


class AbortAttempt(Tagged, frozen=True, kw_only=True):
    """Stop decoding or grading an attempt. Its tokens are counted and thrown away."""

    attempt: AttemptId


class GradeAttempt(Tagged, frozen=True, kw_only=True):
    """Compute the reward of a finished attempt. Answered by ``AttemptGraded``."""

    attempt: AttemptId


class AcceptGroup(Tagged, frozen=True, kw_only=True):
    """These graded attempts are the prompt's group in this step's update. ``informative``: their
    rewards differ. If not, most algorithms have advantages of zero."""

    prompt: PromptId
    attempts: tuple[AttemptId, ...]
    informative: bool


class DropGroup(Tagged, frozen=True, kw_only=True):
    """The prompt is done and is not trained on, for ``reason``."""

    prompt: PromptId
    attempts: tuple[AttemptId, ...]
    reason: str


class DeferPrompt(Tagged, frozen=True, kw_only=True):
    """The prompt lost its race and waits for a long round."""

    prompt: Prompt


class MigrateAttempts(Tagged, frozen=True, kw_only=True):
    """Move running attempts to another engine. Answered by one ``AttemptMigrated`` each."""

    attempts: tuple[AttemptId, ...]
    source: EngineId
    target: EngineId


class OfferTail(Tagged, frozen=True, kw_only=True):
    """Most responses are there, so other jobs may have the nodes. ``TailReleased`` if one does."""


class FormEngine(Tagged, frozen=True, kw_only=True):
    """Join the devices of ``members``, engines of the smallest size, to ``engine``, one of them.
    All their attempts stop and are migrated. Answered by ``EngineFormed``."""

    engine: EngineId
    members: tuple[EngineId, ...]


class SleepEngine(Tagged, frozen=True, kw_only=True):
    """``engine`` lends its memory to a replica until it has new weights. Answered by
    ``EngineSlept``."""

    engine: EngineId


class Speculate(Tagged, frozen=True, kw_only=True):
    """``engine`` decodes with drafts while it runs at most ``below`` attempts, until it has new
    weights. The fields are those of ``engine.base.Speculation``."""

    engine: EngineId
    below: int
    most: int
    free: int
    row_cost: float


class AccumulateGradients(Tagged, frozen=True, kw_only=True):
    """Add the gradients of these parts on ``replica``. Answered by ``GradientsAccumulated``."""

    replica: ReplicaId
    parts: tuple[GroupPart, ...]


class FinishRollout(Tagged, frozen=True, kw_only=True):
    """No attempt of this step is left running, and every group is decided."""

    step: int
    round: RoundKind


class ApplyUpdate(Tagged, frozen=True, kw_only=True):
    """All gradients of this update are summed: divide once, reduce and change the weights.
    ``last``: the step has no further update."""

    step: int
    update: int
    last: bool


class PublishWeights(Tagged, frozen=True, kw_only=True):
    """Bring the weights of step ``version`` to all engines. Answered by ``WeightsPublished``."""

    version: int


Decision = (
    DrawPrompts
    | BeginRound
    | StartAttempt
    | StepEnvironment
    | ContinueAttempt
    | AbortAttempt
    | GradeAttempt
    | AcceptGroup
    | DropGroup
    | DeferPrompt
    | MigrateAttempts
    | OfferTail
    | FormEngine
    | SleepEngine
    | Speculate
    | AccumulateGradients
    | FinishRollout
    | ApplyUpdate
    | PublishWeights
)
