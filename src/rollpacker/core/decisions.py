"""What to do, in the imperative. Policies make decisions, drivers perform them without waiting."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.core.types import AttemptId, GroupPart, Prompt, PromptId, RoundKind, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawPrompts:
    """Take up to ``counts[domain]`` fresh prompts of each domain; answered by ``PromptsDrawn``."""

    counts: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginRound:
    """The kind of this step's round; announced before its first attempt.

    ``updates``: steps' worth of prompts that it runs, with an update for each.
    """

    step: int
    round: RoundKind
    updates: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAttempt:
    """Sample response ``index`` of ``prompt`` on ``worker``."""

    attempt: AttemptId
    prompt: PromptId
    index: int
    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortAttempt:
    """Stop decoding or grading an attempt; its tokens are counted and thrown away."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class GradeAttempt:
    """Compute the reward of a finished attempt; answered by ``AttemptGraded``."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptGroup:
    """These graded attempts are the prompt's group in this step's update.

    ``informative``: their rewards differ; otherwise their advantages are zero.
    """

    prompt: PromptId
    attempts: tuple[AttemptId, ...]
    informative: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGroup:
    """The prompt is done without being trained on; ``reason`` says why."""

    prompt: PromptId
    attempts: tuple[AttemptId, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeferPrompt:
    """The prompt lost its race and waits for a long round."""

    prompt: Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateAttempts:
    """Move running attempts to another worker; answered by one ``AttemptMigrated`` each."""

    attempts: tuple[AttemptId, ...]
    source: WorkerId
    target: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTail:
    """Most responses are there: whoever shares the nodes may have them; ``TailReleased`` if so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegroupWorkers:
    """The devices of ``members`` become one engine, run by ``lead``, one of them.

    Whatever they decode stops where it is and is migrated, to ``lead`` itself too.
    """

    lead: WorkerId
    members: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulateGradients:
    """Add these parts' gradients on ``worker``; answered by ``GradientsAccumulated``."""

    worker: WorkerId
    parts: tuple[GroupPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRollout:
    """No attempt of this step is left running and every group is decided."""

    step: int
    round: RoundKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyUpdate:
    """All gradients of this update are summed: divide once, reduce and change the weights.

    A step has one update, or several over mini-batches of its groups; ``last`` ends the step.
    """

    step: int
    update: int
    last: bool


Decision = (
    DrawPrompts
    | BeginRound
    | StartAttempt
    | AbortAttempt
    | GradeAttempt
    | AcceptGroup
    | DropGroup
    | DeferPrompt
    | MigrateAttempts
    | OfferTail
    | RegroupWorkers
    | AccumulateGradients
    | FinishRollout
    | ApplyUpdate
)
