"""Whom the driver works with: engines, replicas and graders, wherever they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rollpacker.core.types import AttemptId, EngineId, PromptId, ReplicaId
from rollpacker.data.base import Row
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.reward.base import Grade
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.shared_weights import SharedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Devices are gone, with what was on them; ``text`` says how."""

    engines: tuple[EngineId, ...]
    replicas: tuple[ReplicaId, ...]
    text: str

    def __str__(self) -> str:
        gone = [*(f"engine {n}" for n in self.engines), *(f"replica {n}" for n in self.replicas)]
        return f"{self.text}; lost: {', '.join(gone)}" if gone else self.text


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what happens, and must not wait."""

    engine: Callable[[EngineId, msg.EngineReport], None]
    replica: Callable[[ReplicaId, msg.ReplicaReport], None]
    lost: Callable[[Loss], None]


class Engines(Protocol):
    """The engines of one run. Commands to one of them are carried out in order."""

    @property
    def engines(self) -> tuple[EngineId, ...]:
        """The live ones."""
        ...

    def to_engine(self, engine: EngineId, command: msg.EngineCommand) -> None:
        """Send a command; nothing happens where the engine is gone: that is reported as such."""
        ...

    def load_weights(self, version: int, weights: Mapping[int, SharedWeights] | None) -> None:
        """Tell all engines, and any that is formed later, to take these, given by node: each
        reports it."""
        ...

    def form(self, engine: EngineId, members: Sequence[EngineId]) -> None:
        """Put the devices of ``members``, which hold nothing, together into one engine.

        Those that ``members`` were report ``Slept``, the new one ``WeightsLoaded``.
        """
        ...

    def disband(self) -> Mapping[EngineId, int]:
        """Undo all ``form``: the engines that were formed, which report ``Slept``, by size."""
        ...


class Replicas(Protocol):
    """The replicas of one run. Commands to one of them are carried out in order."""

    @property
    def replicas(self) -> tuple[ReplicaId, ...]:
        """The live ones."""
        ...

    def to_replica(self, replica: ReplicaId, command: msg.ReplicaCommand) -> None:
        """Send a command; nothing happens where the replica is gone."""
        ...

    def meet(self) -> None:
        """Let the live replicas form one process group if one has died since they last did."""
        ...


class WeightTransport(Protocol):
    """Brings the weights of replicas to engines of other processes, and nodes."""

    def share(self) -> ReplicaId:
        """Let a replica share its weights; the one that will report ``Shared``."""
        ...

    def node(self, engine: EngineId) -> int:
        """That an engine is on."""
        ...

    def home(self, replica: ReplicaId) -> int:
        """The node of a replica's lead, which shares its weights there."""
        ...

    def carry(self, replica: ReplicaId, size: int) -> Sequence[EngineId]:
        """Bring shared weights of ``size`` bytes to the other nodes that decode: the replica and
        each of these engines, one of each node, report ``Carried``. None where nothing is to do."""
        ...

    def leave(self, then: Callable[[], None]) -> None:
        """Let replicas leave the devices, where they take turns on these, and go on."""
        ...

    def part(self) -> None:
        """A ``carry`` has failed: the next one begins anew."""
        ...

    def abandon(self, kept: Sequence[int], why: str) -> None:
        """Go on with the engines of these nodes only; the others' loss is reported."""
        ...


class Workers(Engines, Replicas, Protocol):
    """The engines and replicas of one run."""

    @property
    def transport(self) -> WeightTransport | None:
        """None: engines read the weights where replicas have them."""
        ...

    @property
    def fleet(self) -> Fleet:
        """What is live, by devices."""
        ...

    def listen(self, listener: Listener) -> AbstractContextManager[None]:
        """Tell this one, and nobody else, while the context lasts."""
        ...

    def unheard(self) -> list[str]:
        """What was lost while nobody listened, since the last call."""
        ...


class Graders(Protocol):
    """Turns responses into rewards."""

    @property
    def broken(self) -> str | None:
        """Why the run cannot go on."""
        ...

    @property
    def needs_group(self) -> bool:
        """Whether the responses of a prompt must be graded together."""
        ...

    def listen(self, take: Callable[[Sequence[Grade]], None]) -> AbstractContextManager[None]:
        """Give grades to this one while the context lasts."""
        ...

    def begin_step(self, step: int, epoch: float | None = None) -> None:
        """How far the run is from now on."""
        ...

    def grade(
        self, attempts: Sequence[Trajectory], rows: Mapping[PromptId, Row], *, training: bool = True
    ) -> None:
        """Start grading; never waits. With ``needs_group``, one prompt's responses a call."""
        ...

    def recall(self, prompt: PromptId, grade: Grade) -> None:
        """Learn from the grade of an interrupted step."""
        ...

    def cancel(self, attempt: AttemptId) -> None:
        """Forget an attempt; its grade is no longer wanted."""
        ...

    def pending(self) -> Mapping[AttemptId, float]:
        """What is being waited for, and for how many seconds."""
        ...

    def end_step(self) -> list[str]:
        """A step is over; returns what failed in it and was mended."""
        ...
