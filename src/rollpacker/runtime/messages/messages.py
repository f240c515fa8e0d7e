"""Messages of the driver and its workers. A channel's order is the order of effects."""

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
    """Decode with the weights of ``version``. Nothing may be running. Answered by
    ``WeightsLoaded``. ``weights`` is their place. None: they are those of the process's own
    replica."""

    version: int
    weights: SharedWeights | None = None


class Sleep(msgspec.Struct, frozen=True, kw_only=True):
    """Release the KV cache until weights come. Nothing may be running. Answered by ``Slept``."""


class Offload(msgspec.Struct, frozen=True, kw_only=True):
    """Move to host memory, as other jobs take the devices. If new weights come meanwhile, an engine
    loads them after its return. Answered by ``Done``."""


class Onload(msgspec.Struct, frozen=True, kw_only=True):
    """Return to the devices. Answered by ``Done``."""


class Submit(msgspec.Struct, frozen=True, kw_only=True):
    """Sample these requests."""

    requests: Sequence[Request]


class Abort(msgspec.Struct, frozen=True, kw_only=True):
    """Stop these attempts. Answered by ``Aborted`` for those that have not ended."""

    attempts: Sequence[AttemptId]


class DecodeAhead(msgspec.Struct, frozen=True, kw_only=True):
    """Use this speculative decoding until new weights come."""

    how: Speculation


class Proceed(msgspec.Struct, frozen=True, kw_only=True):
    """In lockstep: the driver has handled finished responses, so decode on."""


class Accumulate(msgspec.Struct, frozen=True, kw_only=True):
    """Add the gradients of these groups, cut to ``parts``. Answered by ``Accumulated``."""

    parts: tuple[GroupPart, ...]
    groups: Sequence[Group]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Compute log-probabilities under the current weights. Answered by ``ScoredSamples``."""

    groups: Sequence[Group]


class Apply(msgspec.Struct, frozen=True, kw_only=True):
    """Reduce, divide, update. Answered by ``Applied``, with a checksum if asked for."""

    total: Partial
    checksum: bool


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Put the weights into the file ``name``, if engines need one. Answered by ``Shared``."""

    name: str


class Reform(msgspec.Struct, frozen=True, kw_only=True):
    """Join a new process group: ``rank`` of ``world``, meeting at ``rendezvous`` (``Span``)."""

    rank: int
    world: int
    rendezvous: str


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """Write model and optimizer under ``folder``. Answered by ``Done``."""

    folder: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Restore model and optimizer from ``folder``. Answered by ``Done``."""

    folder: str


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Leave."""


class Carry(msgspec.Struct, frozen=True, kw_only=True):
    """Bring shared weights once to each other node that decodes. Answered by ``Carried``.

    Args:
        meeting: where the members meet (``Span``), the same for the same members.
        rank: 0 has the weights. Each other rank is the only one of its node.
        name: of a file for the receivers.
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
    """Sums over decode steps of a similar number of sequences.

    Args:
        tokens: of one sequence, more than one a step with speculative decoding.
        sequences: in the step's batch, summed over these tokens.
        context: tokens of all these sequences, summed likewise.
        prefill_tokens: prefilled in these steps.
        ended: sequences that left the engine.
        seconds: since the end of the step before, if the engine had work all the while.
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
"""Whether drafts were on, whether the step prefilled, and the bits of its sequences less one."""
StepTimes = Mapping[StepKind, StepSums]


def joined(parts: Iterable[StepTimes]) -> StepTimes:
    """Sum the times of several engines or periods."""
    found: dict[StepKind, StepSums] = {}
    for part in parts:
        for key, sums in part.items():
            found[key] = found.get(key, StepSums()).plus(sums)
    return found


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """The work of an engine and its process since ``BeginStep`` or the last report.

    Args:
        prefill_tokens: of prompts, and of responses that were recomputed.
        cached_tokens: of requests whose KV of the last turn was found.
        preemptions: sequences removed for lack of KV.
        decode_s: seconds of a recent decode step by its rows. Empty if the engine does not count
            rows.
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
        """The sum, where ``other`` is the later one."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _COUNTED}
        times = joined((self.step_times, other.step_times))
        return Work(**sums, decode_s=other.decode_s, step_times=times)


_COUNTED = [name for name in Work.__struct_fields__ if name not in ("decode_s", "step_times")]


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The worker has its model. ``info`` is of the engine that it leads, if there is one."""

    info: EngineInfo | None = None


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """The process lives.

    Args:
        at: its current work in words, empty while it waits for a command.
        done: pieces of work that have ended.
        longest_s: seconds of the longest such piece, None if there was none.
    """

    at: str = ""
    done: int = 0
    longest_s: float | None = None


class Noted(msgspec.Struct, frozen=True, kw_only=True):
    """A line for the user."""

    text: str


class WeightsLoaded(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of ``size`` devices has the weights."""

    version: int
    work: Work
    size: int = 1


class Slept(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of ``size`` devices has released its KV cache, after this work."""

    work: Work
    size: int


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """These attempts are complete."""

    outputs: Sequence[Output]


class Aborted(msgspec.Struct, frozen=True, kw_only=True):
    """These attempts have stopped, with partial outputs. Ended ones are not among them."""

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
    """The answer to ``Score``, by sample. Times are of the monotonic clock."""

    logprobs: dict[SampleId, NDArray[np.float32]]
    start_s: float
    end_s: float


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The update is done. ``checksum`` is of the new weights, or 0."""

    update: Update
    checksum: int
    start_s: float
    end_s: float


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """The weights are shared. None from ranks that do not lead their replica."""

    weights: SharedWeights | None
    start_s: float
    end_s: float


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """A command has ended or failed. ``host_bytes``: held in host memory by an ``Offload``."""

    fault: Fault | None = None
    host_bytes: int = 0


class Died(msgspec.Struct, frozen=True, kw_only=True):
    """The worker cannot go on."""

    fault: Fault


class Carried(msgspec.Struct, frozen=True, kw_only=True):
    """The weights have come or were sent. ``problem``: why not."""

    weights: SharedWeights | None
    start_s: float
    end_s: float
    problem: str = ""


EngineReport = WeightsLoaded | Slept | Finished | Aborted | Failed | Carried
ReplicaReport = Accumulated | ScoredSamples | Applied | Shared | Carried
Report = EngineReport | ReplicaReport | Ready | Beat | Noted | Done | Died
