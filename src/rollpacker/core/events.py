"""What happened, in the past tense. Drivers make events, policies take them."""

from __future__ import annotations

from rollpacker.core.codec import Tagged
from rollpacker.core.types import AttemptId, EngineId, FinishReason, GroupPart, Prompt, ReplicaId


class StepStarted(Tagged, frozen=True, kw_only=True):
    """All engines hold the weights of ``step``; a rollout round may begin.

    ``remaining`` counts the fresh prompts of each domain that this epoch still has.
    """

    step: int
    engines: tuple[EngineId, ...]
    replicas: tuple[ReplicaId, ...]
    remaining: dict[str, int]


class PromptsDrawn(Tagged, frozen=True, kw_only=True):
    """Answer to ``DrawPrompts``: fresh prompts in data order; fewer where a domain ran out."""

    prompts: tuple[Prompt, ...]


class AttemptFinished(Tagged, frozen=True, kw_only=True, omit_defaults=True):
    """A response is complete (``stop``) or truncated (``length``); ``tokens`` were generated.

    ``drafted`` tokens were guessed, and ``accepted`` of them were right, in ``verifications`` of
    its decode steps. Its environment took ``seconds`` to end the episode; of one that is used again
    after an interruption, in all of its ``turns``. ``carried`` tokens are of earlier steps.
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
    """The model has ended turn ``turn`` (from 0) of an attempt with an environment, or was cut off
    (``length``); ``tokens`` were sampled in all its turns."""

    attempt: AttemptId
    turn: int
    tokens: int
    finish_reason: FinishReason


class EnvironmentReplied(Tagged, frozen=True, kw_only=True):
    """An environment has answered turn ``turn`` after ``seconds``, with messages of ``tokens``:
    the attempt goes on. Turn -1 is its beginning. One that ends the episode is ``AttemptFinished``.
    """

    attempt: AttemptId
    turn: int
    tokens: int
    seconds: float


class EpisodeFailed(Tagged, frozen=True, kw_only=True):
    """An attempt's environment raised, hung or died.

    ``blameless``: it died with its process, which another attempt's environment brought down.
    """

    attempt: AttemptId
    error: str
    blameless: bool = False


class AttemptAborted(Tagged, frozen=True, kw_only=True, omit_defaults=True):
    """An attempt that was told to stop has stopped after ``tokens`` generated tokens.

    ``estimated``: from how long it ran, where the engine does not say how many it had.
    """

    attempt: AttemptId
    tokens: int
    estimated: bool = False


class AttemptFailed(Tagged, frozen=True, kw_only=True):
    """The engine could not finish an attempt."""

    attempt: AttemptId
    error: str


class AttemptGraded(Tagged, frozen=True, kw_only=True):
    """The reward of a finished attempt has come back; None where no reward function applies."""

    attempt: AttemptId
    reward: float | None


class GradingFailed(Tagged, frozen=True, kw_only=True):
    """The reward of a finished attempt cannot be computed: it raised, hung or returned nonsense."""

    attempt: AttemptId
    error: str


class AttemptMigrated(Tagged, frozen=True, kw_only=True):
    """A running attempt continues on another engine, with ``tokens`` generated so far."""

    attempt: AttemptId
    engine: EngineId
    tokens: int


class TailReleased(Tagged, frozen=True, kw_only=True):
    """Another job has the nodes: what still decodes is to leave most engines."""


class GradientsAccumulated(Tagged, frozen=True, kw_only=True):
    """A replica has added the gradients of these parts to its sum, in ``seconds``."""

    replica: ReplicaId
    parts: tuple[GroupPart, ...]
    seconds: float


class UpdateApplied(Tagged, frozen=True, kw_only=True):
    """The weights have changed (or the update was skipped): update ``update`` of ``step``."""

    step: int
    update: int


class WeightsPublished(Tagged, frozen=True, kw_only=True):
    """Answer to ``PublishWeights``: all engines hold them; the step is over."""

    version: int


class EngineFormed(Tagged, frozen=True, kw_only=True):
    """Answer to ``FormEngine``: it takes attempts."""

    engine: EngineId


class EngineSlept(Tagged, frozen=True, kw_only=True):
    """Answer to ``SleepEngine``: replicas have its memory."""

    engine: EngineId


class RoundMeasured(Tagged, frozen=True, kw_only=True):
    """Preemptions of all engines in the round that has just ended."""

    step: int
    preemptions: int


class DecodeTimed(Tagged, frozen=True, kw_only=True):
    """What decode steps of the engines took lately: rows that they ran, each a token of a sequence
    or of its draft, and seconds."""

    step: int
    rows: tuple[tuple[int, float], ...]


class EpochEnded(Tagged, frozen=True, kw_only=True):
    """The data is used up; prompts still queued are given up (``data.drop_last``)."""

    epoch: int


class DevicesLost(Tagged, frozen=True, kw_only=True):
    """Devices are gone: what the engines ran must run elsewhere, the replicas' sums are lost."""

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
