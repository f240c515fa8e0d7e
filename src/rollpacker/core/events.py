"""What happened, in the past tense. Drivers make events, policies take them."""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.core.types import AttemptId, FinishReason, GroupPart, Prompt, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted:
    """All workers hold the weights of ``step``; a rollout round may begin.

    ``remaining`` counts the fresh prompts of each domain that this epoch still has.
    """

    step: int
    workers: tuple[WorkerId, ...]
    remaining: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsDrawn:
    """Answer to ``DrawPrompts``: fresh prompts in data order; fewer where a domain ran out."""

    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFinished:
    """A response is complete (``stop``) or truncated (``length``); ``tokens`` were generated."""

    attempt: AttemptId
    tokens: int
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptAborted:
    """An attempt that was told to stop has stopped after ``tokens`` generated tokens."""

    attempt: AttemptId
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """The engine could not finish an attempt."""

    attempt: AttemptId
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptGraded:
    """The reward of a finished attempt has come back; None where no reward function applies."""

    attempt: AttemptId
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingFailed:
    """The reward of a finished attempt cannot be computed: it raised, hung or returned nonsense."""

    attempt: AttemptId
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptMigrated:
    """A running attempt continues on another worker, with ``tokens`` generated so far."""

    attempt: AttemptId
    worker: WorkerId
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TailReleased:
    """Another job has the nodes: what still decodes is to leave most workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsAccumulated:
    """A worker has added the gradients of these parts to its sum, in ``seconds``."""

    worker: WorkerId
    parts: tuple[GroupPart, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateApplied:
    """The weights have changed (or the update was skipped): update ``update`` of ``step``."""

    step: int
    update: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundMeasured:
    """What the engines went through in the round that has just ended.

    ``preemptions`` of all engines; ``peak_kv``: largest share of an engine's KV budget in use.
    """

    step: int
    preemptions: int
    peak_kv: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """The data is used up; prompts still queued are given up (``data.drop_last``)."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker process died; what it ran must run elsewhere."""

    worker: WorkerId


Event = (
    StepStarted
    | PromptsDrawn
    | AttemptFinished
    | AttemptAborted
    | AttemptFailed
    | AttemptGraded
    | GradingFailed
    | AttemptMigrated
    | TailReleased
    | GradientsAccumulated
    | UpdateApplied
    | RoundMeasured
    | EpochEnded
    | WorkerLost
)
