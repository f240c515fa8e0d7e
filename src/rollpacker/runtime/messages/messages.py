"""What the driver and its workers say to each other. Order in a channel is order of effect."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import AttemptId, Group, GroupPart
from rollpacker.engine.base import EngineInfo, Output, Request, Speculation
from rollpacker.runtime.messages.faults import Fault
from rollpacker.runtime.messages.shared_weights import SharedWeights
from rollpacker.train.base import Partial, SampleId, Update


class BeginStep(msgspec.Struct, frozen=True, kw_only=True):
    """Count work from now on."""


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Decode with the newest weights, ``version``; nothing may be running. Answered by
    ``WeightsLoaded``. ``weights``: where they are; None: those of the process's own replica."""

    version: int
    weights: SharedWeights | None = None


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """Give the KV cache's memory back until weights come; nothing may be running. Answered by
    ``Slept``."""


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """Other jobs take the devices: leave them, and wait in host memory. An engine that is given
    weights meanwhile loads them when it is back. Answered by ``Done``."""


class Onload(msgspec.Struct, frozen=True, kw_only=True):
    """Come back to the devices. Answered by ``Done``."""


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """Sample these."""

    requests: Sequence[Request]


class Abort(msgspec.Struct, frozen=True, kw_only=True):
    """Stop these; answered by ``Aborted`` for those that were still there."""

    attempts: Sequence[AttemptId]


class DecodeAhead(msgspec.Struct, frozen=True, kw_only=True):
    """Decode ahead so, until new weights come."""

    how: Speculation


class Proceed(msgspec.Struct, frozen=True, kw_only=True):
    """In lockstep: what finished has been dealt with, decode on."""


class Accumulate(msgspec.Struct, frozen=True, kw_only=True):
    """Add the gradients of these groups, cut to ``parts``; answered by ``Accumulated``."""

    parts: tuple[GroupPart, ...]
    groups: Sequence[Group]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of these under the weights in place; answered by ``ScoredSamples``."""

    groups: Sequence[Group]


class Apply(msgspec.Struct, frozen=True, kw_only=True):
    """Reduce, divide, update; answered by ``Applied``, with a checksum if asked for."""

    total: Partial
    checksum: bool


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Put the weights to where engines of other processes read them; answered by ``Shared``.

    ``name``: of a file that may be needed for it.
    """

    name: str


class Reform(msgspec.Struct, frozen=True, kw_only=True):
    """Join a new process group: ``rank`` of ``world``, meeting at ``rendezvous`` (``Span``)."""

    rank: int
    world: int
    rendezvous: str


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Write model and optimizer under ``folder``; answered by ``Done``."""

    folder: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Restore model and optimizer from ``folder``; answered by ``Done``."""

    folder: str


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Leave."""


class Carry(msgspec.Struct, frozen=True, kw_only=True):
    """Bring shared weights to the other nodes that decode, once each; answered by ``Carried``.

    Args:
        meeting: where those that take part meet (``Span``); the same one as before while they are
            the same.
        rank: among them; 0 has the weights, each other is the only one of its node.
        world: how many they are.
        size: bytes of the weights.
        name: of a file that those that receive may need.
    """

    meeting: str
    rank: int
    world: int
    size: int
    name: str


EngineCommand = BeginStep | LoadWeights | Sleep | Submit | Abort | DecodeAhead | Proceed | Carry
ReplicaCommand = Accumulate | Score | Apply | Share | Reform | Save | Load | Carry
Command = EngineCommand | ReplicaCommand | Offload | Onload | Stop


class StepSums(NamedTuple):
    """Sums over decode steps of about as many sequences.

    Args:
        tokens: of one sequence; more than one a step where the engine decodes ahead.
        sequences: that the step decoded, for each of these tokens.
        context: tokens of all of them, likewise.
        prefill_tokens: that the steps ran besides.
        ended: sequences that left the engine in them.
        seconds: from the end of the step before, where the engine had work all the while.
    """

    tokens: float = 0.0
    sequences: float = 0.0
    context: float = 0.0
    prefill_tokens: float = 0.0
    ended: float = 0.0
    seconds: float = 0.0

    def plus(self, other: StepSums) -> StepSums:
        return StepSums(*(a + b for a, b in zip(self, other, strict=True)))


StepKind = tuple[bool, bool, int]
"""Whether the engine was told to decode ahead, whether it prefilled, and the bits of the number of
sequences less one."""
StepTimes = Mapping[StepKind, StepSums]


def joined(parts: Iterable[StepTimes]) -> StepTimes:
    """Those of several engines, or of one after the other."""
    found: dict[StepKind, StepSums] = {}
    for part in parts:
        for key, sums in part.items():
            found[key] = found.get(key, StepSums()).plus(sums)
    return found


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine and its process have done since ``BeginStep``, or the last report of it.

    Args:
        prefill_tokens: of prompts, and of responses that were recomputed.
        cached_tokens: of requests whose last turn's KV was found, and which were not prefilled.
        preemptions: sequences thrown out for lack of KV.
        decode_s: seconds of a decode step by the rows that it runs, lately; empty where the engine
            does not tell rows.
        step_times: sums over all decode steps.
        start_s: seconds from ``BeginStep`` to the first decode step.
    """

    decode_steps: int
    generated_tokens: int
    prefill_tokens: int
    preemptions: int
    cpu_s: float
    decode_cpu_s: float
    cached_tokens: int = 0
    decode_s: Mapping[int, float] = msgspec.field(default_factory=dict[int, float])
    step_times: StepTimes = msgspec.field(default_factory=dict[StepKind, StepSums])
    start_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        """Of both, ``other`` being the later one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTED}
        times = joined((self.step_times, other.step_times))
        return Work(**sums, decode_s=other.decode_s, step_times=times)


_COUNTED = [name for name in Work.__struct_fields__ if name not in ("decode_s", "step_times")]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The worker has its model, and the engine that it leads, if it does, can do this."""

    info: EngineInfo | None = None


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The process lives.

    Args:
        at: what it is at, in words; empty while it waits for a command.
        done: pieces of work that it has ended.
        longest_s: that one of this kind took at the most; None where it has ended none.
    """

    at: str = ""
    done: int = 0
    longest_s: float | None = None


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """The user should know."""

    text: str


class WeightsLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """The engine has them; ``size``: devices that it spans."""

    version: int
    work: Work
    size: int = 1


class Slept(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of ``size`` devices has no KV cache, and has done this."""

    work: Work
    size: int


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """These attempts are complete."""

    outputs: Sequence[Output]


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """These attempts have stopped; partial outputs. What had ended before is not among them."""

    outputs: Sequence[Output]


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The engine could not take or finish these attempts."""

    attempts: Sequence[AttemptId]
    error: str


class Accumulated(msgspec.Struct, frozen=True, kw_only=True):
    """The gradients of these parts are in the sum. Times are of the monotonic clock."""

    parts: tuple[GroupPart, ...]
    partial: Partial
    start_s: float
    end_s: float


class ScoredSamples(msgspec.Struct, frozen=True, kw_only=True):
    """What ``Score`` asked for, by sample. Times are of the monotonic clock."""

    logprobs: dict[SampleId, NDArray[np.float32]]
    start_s: float
    end_s: float


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The update is done; ``checksum`` is of the new weights (0 when not asked for)."""

    update: Update
    checksum: int
    start_s: float
    end_s: float


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """The weights are there; None from those that do not lead their replica."""

    weights: SharedWeights | None
    start_s: float
    end_s: float


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """It has ended; ``fault`` says what went wrong.

    Args:
        host_bytes: of an ``Offload``: what waits in host memory.
    """

    fault: Fault | None = None
    host_bytes: int = 0


class Died(msgspec.Struct, frozen=True, kw_only=True):
    """The worker cannot go on."""

    fault: Fault


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """The weights have come, or have been sent. ``problem``: why not, in words."""

    weights: SharedWeights | None
    start_s: float
    end_s: float
    problem: str = ""


EngineReport = WeightsLoaded | Slept | Finished | Aborted | Failed | Carried
ReplicaReport = Accumulated | ScoredSamples | Applied | Shared | Carried
Report = EngineReport | ReplicaReport | Ready | Beat | Noted | Done | Died
