"""Which processes a run has, on which devices, and what each of them is a part of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollpacker.config import RunConfig
from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.engine.base import Span
from rollpacker.policy.division import apart, check_engines, replica_size, split
from rollpacker.runtime.worker import EnginePart, ReplicaPart

Place = tuple[str, tuple[int, ...]]
"""A device and the CPU cores beside it, empty for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """One process: its device, and its parts in an engine, a replica or both.

    ``number``: of the device on its node.
    """

    place: Place
    number: int
    engine: EnginePart | None = None
    replica: ReplicaPart | None = None


def lay_out(
    config: RunConfig, places: Sequence[Place], sizes: Sequence[int], folder: Path
) -> list[Post]:
    """All processes; a process's number is its place in the list.

    Args:
        config: the run's.
        places: its devices.
        sizes: tensor-parallel sizes that engines may have, ascending; those of more than the first
            rest until neighbours are put together.
        folder: for the files at which they meet.

    Raises ``ValueError`` where devices do not divide.
    """
    decoding, training = split(config, places)
    check_engines(config, len(decoding))
    shard = replica_size(config, len(training))
    # Libraries name what they leave in shared memory after the file alone.
    unique = folder / folder.name
    # A colocated replica has the number of its first engine.
    step = sizes[0] if config.devices.layout == "colocated" else shard
    replicas = [
        Post(
            place=place,
            number=number + len(places) - len(training),
            replica=ReplicaPart(replica=ReplicaId(start // step), span=span),
        )
        for number, (start, place, span) in enumerate(_spans(training, shard, f"{unique}-replica"))
    ]
    if not apart(config):
        return [
            replace(post, engine=EnginePart(engine=EngineId(n))) for n, post in enumerate(replicas)
        ]
    engines = [
        Post(
            place=place,
            number=start + span.rank,
            engine=EnginePart(
                engine=EngineId(start // sizes[0]), span=span, resting=size > sizes[0]
            ),
        )
        for size in sizes
        for start, place, span in _spans(decoding, size, f"{unique}-engine-{size}")
    ]
    return [*engines, *replicas]


def _spans(places: Sequence[Place], size: int, meeting: str) -> Iterator[tuple[int, Place, Span]]:
    """Neighbours in parts of ``size``: the first one of each, and everybody's place in it."""
    for number, place in enumerate(places[: len(places) // size * size]):
        start = number - number % size
        yield start, place, Span(rank=number % size, size=size, meeting=f"{meeting}-{start}")
