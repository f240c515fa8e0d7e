"""What the scheduler knows of a job: its specification, and what was observed of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollpacker.core.codec import read_record, says

RING = 60
"""Iterations that are remembered."""
KNOWN_AFTER = 5
"""Observed iterations after which a job is planned by what was observed."""

_Gang = Annotated[int, Meta(ge=1, le=1024)]
_Count = Annotated[int, Meta(ge=1, le=10**9)]
_Seconds = Annotated[float, Meta(ge=1e-3, lt=1e9)]
"""Forecasts tell times apart that are a millisecond at least."""
_Memory = Annotated[float, Meta(ge=0)]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a job asks for. Limits are checked where one is read, as by ``from_json``."""

    id: Annotated[str, says("unique.", min_length=1)]
    worst_rollout_s: Annotated[
        _Seconds,
        says("seconds of a rollout with every response at the cap, sync and warm switch included."),
    ]
    worst_train_s: Annotated[_Seconds, says("the same of a training phase.")]
    rollout_nodes: Annotated[_Gang, says("gang size on the rollout pool.")] = 1
    train_nodes: Annotated[_Gang, says("gang size on the training pool.")] = 1
    slo: Annotated[
        float,
        says("allowed slowdown of the whole life against running alone; 1 or more.", ge=1, lt=1e6),
    ] = 1.5
    iterations: Annotated[
        _Count | None,
        says("how many there will be; None where the user cannot say."),
    ] = None
    expected_iterations: Annotated[
        _Count | None,
        says(
            "about how many, where the exact number is not known: for plans and forecasts; the "
            "job may stop before, or go on."
        ),
    ] = None
    rollout_memory_gb: Annotated[
        _Memory, says("host memory that stays taken on every rollout node.")
    ] = 150.0
    train_memory_gb: Annotated[_Memory, says("the same on every training node.")] = 250.0
    owner: Annotated[
        str,
        says(
            "what a later start of the same job says too, so that it may take the job over.",
            max_length=64,
        ),
    ] = ""
    team: Annotated[str, says("whose share of the nodes it takes.")] = ""
    priority: Annotated[int, says("the higher ones of a team go first.")] = 0
    node_devices: Annotated[int, says("devices that every node must have at least.", ge=1)] = 1
    rollout_labels: Annotated[
        Mapping[str, str], says("labels that every rollout node must have.")
    ] = msgspec.field(default_factory=dict[str, str])
    train_labels: Annotated[
        Mapping[str, str], says("labels that every training node must have.")
    ] = msgspec.field(default_factory=dict[str, str])
    slo_since: Annotated[
        Literal["admission", "submission"],
        says(
            "when the SLO begins: with `admission`, or with `submission`, so that waiting "
            "uses it up."
        ),
    ] = "admission"
    too_large: Annotated[
        Literal["refuse", "wait"],
        says(
            "what to do with a gang that all nodes together are too few for: `refuse` it, or let "
            "it `wait` for more nodes."
        ),
    ] = "refuse"

    @property
    def gangs(self) -> tuple[int, int]:
        """Nodes of either pool that it asks for."""
        return self.rollout_nodes, self.train_nodes

    def left(self, done: int) -> int | None:
        """Iterations to come after so many; None where nobody can say, as of a job that goes on
        though more are done than were expected."""
        if self.iterations is not None:
            return self.iterations - done
        if self.expected_iterations is None or done >= self.expected_iterations:
            return None
        return self.expected_iterations - done

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobSpec:
        """From a JSON object. Raises ``ValueError`` on an unknown, missing or wrong key."""
        try:
            return read_record(data, cls)
        except ValueError as error:
            raise ValueError(f"job {data.get('id')}: {error}") from error


def host_memory_gb(
    parameters_b: float, *, tensor_parallel: int = 8, train_nodes: int = 1
) -> tuple[float, float]:
    """Host memory in GB of a rollout node and of a training node.

    bf16 weights once per engine of ``tensor_parallel`` devices of eight, and 18 bytes a parameter
    of training state over the training nodes, each with 100 GB of processes and caches.
    """
    rollout = 100.0 + 2.0 * parameters_b * 8 / tensor_parallel
    return rollout, 100.0 + 18.0 * parameters_b / train_nodes


@dataclass(slots=True)
class Observed:
    """The last ``RING`` iterations of a job.

    Args:
        ring: rollout and training seconds of each, alone.
        count: iterations that ever were.
        means: of both over the ring; only once something was seen.
    """

    ring: list[tuple[float, float]] = field(default_factory=list)
    count: int = 0
    means: tuple[float, float] = (0.0, 0.0)

    def add(self, rollout_s: float, train_s: float) -> None:
        self.ring.append((rollout_s, train_s))
        del self.ring[:-RING]
        self.count += 1
        rollout, train = zip(*self.ring, strict=True)
        self.means = (sum(rollout) / len(rollout), sum(train) / len(train))

    @property
    def known(self) -> bool:
        """Whether enough was seen to plan by it."""
        return self.count >= KNOWN_AFTER
