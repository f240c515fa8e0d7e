"""Events are in the past tense. Drivers make them, and policies take them."""

from __future__ import annotations

from rollpacker.core.codec import Tagged
from rollpacker.core.types import AttemptId, EngineId, FinishReason, GroupPart, Prompt, ReplicaId


class StepStarted(Tagged, frozen=True, kw_only=True):
    """All engines hold the weights of ``step``, so a rollout round may begin. ``remaining`` counts
    the fresh prompts of each domain that this epoch still has."""

    step: int
    engines: tuple[EngineId, ...]
    replicas: tuple[ReplicaId, ...]
    remaining: dict[str, int]


class PromptsDrawn(Tagged, frozen=True, kw_only=True):
    """Answer to ``DrawPrompts``: fresh prompts in data order, fewer if a domain ran out."""

    prompts: tuple[Prompt, ...]


class AttemptFinished(Tagged, frozen=True, kw_only=True, omit_defaults=True):
    """A response of ``tokens`` tokens is complete (``stop``) or truncated (``length``).

    ``accepted`` of ``drafted`` tokens were right, in ``verifications`` decode steps. Its
    environment took ``seconds`` to end the episode. If an episode is used again after an
    interruption, ``seconds`` are those of all its ``turns``. ``carried`` tokens were sampled in
    earlier steps.
    """

    attempt: AttemptId
    tokens: int
    finish_reason: FinishReason
    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    turns: int = 0
    carried: int = 0


class TurnFinished(Tagged, frozen=True, kw_only=True):
    """The model ended turn ``turn`` (from 0) of an attempt with an environment, or was cut off
    (``length``). ``tokens`` were sampled in all its turns."""

    attempt: AttemptId
    turn: int
    tokens: int
    finish_reason: FinishReason


class EnvironmentReplied(Tagged, frozen=True, kw_only=True):
    """An environment answered turn ``turn`` after ``seconds`` with ``tokens`` tokens, and the
    attempt goes on. Turn -1 is the beginning."""

    attempt: AttemptId
    turn: int
    tokens: int
    seconds: float


class EpisodeFailed(Tagged, frozen=True, kw_only=True):
    """An attempt's environment raised, hung or died. ``blameless``: another attempt's environment
    brought down the process that they shared."""

    attempt: AttemptId
    error: str
    blameless: bool = False


class AttemptAborted(Tagged, frozen=True, kw_only=True, omit_defaults=True):
    """An aborted attempt has stopped after ``tokens`` generated tokens. ``estimated``: the engine
    gives no count, so ``tokens`` follow from the time that it ran."""

    attempt: AttemptId
    tokens: int
    estimated: bool = False


class AttemptFailed(Tagged, frozen=True, kw_only=True):
    """The engine could not finish an attempt."""

    attempt: AttemptId
    error: str


class AttemptGraded(Tagged, frozen=True, kw_only=True):
    """The reward of a finished attempt. It is None if no reward function applies."""

    attempt: AttemptId
    reward: float | None


class GradingFailed(Tagged, frozen=True, kw_only=True):
    """A reward function raised, hung or returned nonsense for a finished attempt."""

    attempt: AttemptId
    error: str


class AttemptMigrated(Tagged, frozen=True, kw_only=True):
    """A running attempt continues on another engine, with ``tokens`` generated so far."""

    attempt: AttemptId
    engine: EngineId
    tokens: int


class TailReleased(Tagged, frozen=True, kw_only=True):
    """Another job has the nodes, so running attempts have to leave most engines."""


class GradientsAccumulated(Tagged, frozen=True, kw_only=True):
    """A replica has added the gradients of these parts to its sum, in ``seconds``."""

    replica: ReplicaId
    parts: tuple[GroupPart, ...]
    seconds: float


class UpdateApplied(Tagged, frozen=True, kw_only=True):
    """Update ``update`` of ``step`` has changed the weights, or was skipped."""

    step: int
    update: int


class WeightsPublished(Tagged, frozen=True, kw_only=True):
    """Answer to ``PublishWeights``: all engines hold the weights, and the step is over."""

    version: int


class EngineFormed(Tagged, frozen=True, kw_only=True):
    """Answer to ``FormEngine``: the engine takes attempts."""

    engine: EngineId


class EngineSlept(Tagged, frozen=True, kw_only=True):
    """Answer to ``SleepEngine``: replicas have the engine's memory."""

    engine: EngineId


class RoundMeasured(Tagged, frozen=True, kw_only=True):
    """Preemptions of all engines in the round that has just ended."""

    step: int
    preemptions: int


class DecodeTimed(Tagged, frozen=True, kw_only=True):
    """Pairs of rows and seconds of recent decode steps. A row is a token, sampled or drafted."""

    step: int
    rows: tuple[tuple[int, float], ...]


class EpochEnded(Tagged, frozen=True, kw_only=True):
    """The epoch's data is used up, and prompts still queued are given up (``data.drop_last``)."""

    epoch: int


class DevicesLost(Tagged, frozen=True, kw_only=True):
    """Devices are gone: attempts of these engines must run elsewhere, sums of replicas are lost."""

    engines: tuple[EngineId, ...]
    replicas: tuple[ReplicaId, ...]


Event = (
    StepStarted
    | PromptsDrawn
    | AttemptFinished
    | TurnFinished
    | EnvironmentReplied
    | EpisodeFailed
    | AttemptAborted
    | AttemptFailed
    | AttemptGraded
    | GradingFailed
    | AttemptMigrated
    | TailReleased
    | GradientsAccumulated
    | UpdateApplied
    | WeightsPublished
    | EngineFormed
    | EngineSlept
    | RoundMeasured
    | DecodeTimed
    | EpochEnded
    | DevicesLost
)
