"""The specification of a job, and observations of its iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from rollpacker.core.codec import read_record, says

RING = 60  # remembered iterations
KNOWN_AFTER = 5  # observed iterations after which plans use the observations

_Gang = Annotated[int, Meta(ge=1, le=1024)]
_Count = Annotated[int, Meta(ge=1, le=10**9)]
_Seconds = Annotated[float, Meta(ge=1e-3, lt=1e9)]
"""Forecasts resolve times of at least a millisecond."""
_Memory = Annotated[float, Meta(ge=0)]


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A job's request. Its limits are checked when it is read, as by ``from_json``."""

    id: Annotated[str, says("unique.", min_length=1)]
    worst_rollout_s: Annotated[
        _Seconds,
        says("rollout seconds with every response at the cap, with sync and warm switch."),
    ]
    worst_train_s: Annotated[_Seconds, says("the same of a training phase.")]
    rollout_nodes: Annotated[_Gang, says("gang size on the rollout pool.")] = 1
    train_nodes: Annotated[_Gang, says("gang size on the training pool.")] = 1
    slo: Annotated[
        float,
        says("allowed slowdown of the whole life against running alone (1 or more).", ge=1, lt=1e6),
    ] = 1.5
    iterations: Annotated[
        _Count | None,
        says("number of iterations (null if the user does not know)."),
    ] = None
    expected_iterations: Annotated[
        _Count | None,
        says(
            "estimated number of iterations, for plans and forecasts, if the exact number is not "
            "known. The job may stop before or continue."
        ),
    ] = None
    rollout_memory_gb: Annotated[_Memory, says("GB that stay taken on every rollout node.")] = 150.0
    train_memory_gb: Annotated[_Memory, says("the same on every training node.")] = 250.0
    owner: Annotated[
        str,
        says(
            "a later start of the same job gives the same value, so that it may take the job over.",
            max_length=64,
        ),
    ] = ""
    team: Annotated[str, says("the team whose share of the nodes it uses.")] = ""
    priority: Annotated[int, says("jobs of a team with a higher one go first.")] = 0
    node_devices: Annotated[int, says("least number of devices of every node.", ge=1)] = 1
    rollout_labels: Annotated[
        Mapping[str, str], says("labels that every rollout node must have.")
    ] = msgspec.field(default_factory=dict[str, str])
    train_labels: Annotated[
        Mapping[str, str], says("labels that every training node must have.")
    ] = msgspec.field(default_factory=dict[str, str])
    slo_since: Annotated[
        Literal["admission", "submission"],
        says("start of the SLO: `admission`, or `submission` so that waiting uses it up."),
    ] = "admission"
    too_large: Annotated[
        Literal["refuse", "wait"],
        says("`refuse` a gang that is larger than all nodes together, or let it `wait` for more."),
    ] = "refuse"

    @property
    def gangs(self) -> tuple[int, int]:
        return self.rollout_nodes, self.train_nodes

    def left(self, done: int) -> int | None:
        """Iterations left after ``done`` (None if unknown or if an estimate is exceeded)."""
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

    Each needs 100 GB for processes and caches. A rollout node of eight devices holds bf16 weights
    once per engine of ``tensor_parallel`` devices. Training nodes share 18 bytes a parameter.
    """
    rollout = 100.0 + 2.0 * parameters_b * 8 / tensor_parallel
    return rollout, 100.0 + 18.0 * parameters_b / train_nodes


@dataclass(slots=True)
class Observed:
    """The last ``RING`` iterations of a job, with seconds alone of both phases, and their means."""

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
        return self.count >= KNOWN_AFTER
