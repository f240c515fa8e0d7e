"""The state of a leased scheduler in pieces. A commit writes the changed ones.

A piece is JSON. Unknown fields are ignored and missing fields get defaults, so that a daemon can
open the state of another version.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from rollpacker.core.codec import dumps, dumps_finite, load, loads
from rollpacker.core.types import Phase
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.scheduler.snapshot import SchedulerSnapshot
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.records import Fence, JobRecord, Lease, Stretch

_PART = "scheduler"
_INVENTORY = "scheduler.inventory"  # slots of machines, or one piece where nodes are rented
_ROWS: dict[str, Callable[[Any], object]] = {
    "jobs": lambda record: record.spec.id,
    "scheduler.jobs": lambda job: job.spec.id,
    "scheduler.groups": lambda group: group.id,
    "scheduler.rehearsed": lambda each: dumps(each.members).decode(),
    _INVENTORY: lambda slot: slot.machine.name,
}
"""Key of an element, for lists whose elements are pieces of their own."""
_BLOCK: Final = 32  # rows of such a list that are compared at once


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFence:
    """A fence with its permits that no entry has ended."""

    tokens: list[int]
    job: str | None
    node: str | None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedState:
    """The result of all entries.

    Heartbeats are not in entries, so leases and agents have no times, which start again with the
    daemon. Only unsettled jobs are included, since others do not change any more.
    """

    seq: int
    now: float
    jobs: list[JobRecord]
    leases: list[Lease]
    fences: list[SavedFence]
    agents: list[str]
    failed: list[str]
    tokens: dict[str, int]
    issued: int
    draining: bool
    outcomes: list[tuple[Phase, str, int]]
    scheduler: SchedulerSnapshot
    identities: dict[str, str] = field(default_factory=dict[str, str])


class History(NamedTuple):
    """Ended jobs in order of their ends, and the last phases."""

    ended: Sequence[JobRecord]
    timeline: Iterable[Stretch]


def state_of(leased: LeasedScheduler) -> LeasedState:
    """The state of a scheduler after its last entry. It shares objects with the scheduler."""
    return LeasedState(
        seq=leased.seq,
        now=leased.now,
        jobs=[leased.jobs[name] for name in leased.unsettled_jobs()],
        leases=[replace(lease, deadline=0.0, beat="") for lease in leased.leases.values()],
        fences=[_saved(fence, leased) for fence in leased.fences],
        agents=list(leased.agents),
        failed=sorted(leased.failed),
        tokens=leased.tokens,
        issued=leased.issued,
        draining=leased.draining,
        outcomes=[(*kind, count) for kind, count in sorted(leased.outcomes.items())],
        scheduler=leased.scheduler.snapshot(),
        identities={node: who for node in leased.agents if (who := leased.agent(node))},
    )


def _saved(fence: Fence, leased: LeasedScheduler) -> SavedFence:
    """An expired permit leaves ``tokens`` before an entry records its end."""
    tokens = sorted(fence.fenced & leased.leases.keys())
    return SavedFence(tokens=tokens, job=fence.job, node=fence.node, why=fence.why)


_Blocks = dict[tuple[str, int], tuple[bytes, Collection[str]]]
"""By list and first row: the rows as they were encoded at once, and the names of their pieces."""


class Difference(NamedTuple):
    """Changed and new pieces, names of removed ones, and the blocks of the new state."""

    changed: dict[str, bytes]
    gone: set[str]
    blocks: _Blocks


class Pieces:
    """The written pieces by name: one for each field, job, group, simulated group and machine.

    To find what changed, the whole state is encoded in blocks, so that no change can be missed.
    Only a block with another text is divided into its rows.
    """

    def __init__(self, written: Mapping[str, bytes]) -> None:
        self.written = dict(written)
        self._blocks: _Blocks = {}

    def difference(self, state: LeasedState) -> Difference:
        found, blocks = dict[str, bytes](), _Blocks()
        for name, value in _parts(state):
            key = _ROWS.get(name) if isinstance(value, list) else None
            for start in range(0, len(value) if key else 1, _BLOCK):
                rows = value[start : start + _BLOCK] if key else value
                text, block = dumps_finite(rows), self._blocks.get((name, start))
                if block is None or block[0] != text:
                    pieces = {name: text}
                    if key:
                        pieces = {f"{name}/{key(row)}": dumps_finite(row) for row in rows}
                    found |= pieces
                    block = text, pieces.keys()
                blocks[name, start] = block
        left = [b[1] for at, b in self._blocks.items() if blocks.get(at) is not b]
        old = set[str]().union(*left) if self._blocks else set(self.written)
        changed = {name: text for name, text in found.items() if self.written.get(name) != text}
        return Difference(changed, old - found.keys(), blocks)

    def accept(self, difference: Difference) -> None:
        """A difference has been written."""
        self.written |= difference.changed
        for name in difference.gone:
            del self.written[name]
        self._blocks = difference.blocks


def _parts(state: LeasedState) -> Iterator[tuple[str, Any]]:
    for prefix, owner in (("", state), (f"{_PART}.", state.scheduler)):
        for each in fields(owner):
            name, value = prefix + each.name, getattr(owner, each.name)
            if name == _INVENTORY:
                value = value.get("slots", value)
            if name != _PART:
                yield name, value


def encode(state: LeasedState) -> dict[str, bytes]:
    """All pieces by name."""
    return Pieces({}).difference(state).changed


def decode(pieces: Mapping[str, bytes | str]) -> LeasedState:
    """The inverse of ``encode``. Raises ``ValueError`` on an invalid state."""
    found: dict[str, Any] = {place: [] for place in _ROWS}
    for name, text in pieces.items():
        place, row, _ = name.partition("/")
        if row:
            found.setdefault(place, []).append(loads(text))
        else:
            found[place] = loads(text)
    if isinstance(found[_INVENTORY], list):
        found[_INVENTORY] = {"slots": found[_INVENTORY]}
    start = f"{_PART}."
    inner = {name[len(start) :]: each for name, each in found.items() if name.startswith(start)}
    return load(found | {_PART: inner}, LeasedState)


def restored(
    state: LeasedState, history: History, settings: Settings, ttl: float
) -> LeasedScheduler:
    """A leased scheduler from a state. Every lease has its full time since the grant."""
    leased = LeasedScheduler(settings, ttl)
    leased.seq, leased.now = state.seq, state.now
    leased.ended = [record.spec.id for record in history.ended]
    leased.gone.update(record.spec.team for record in history.ended)
    records = sorted([*state.jobs, *history.ended], key=lambda record: record.number)
    leased.jobs = {record.spec.id: record for record in records}
    for lease in state.leases:
        leased.leases[lease.token] = replace(lease, deadline=lease.granted + ttl)
    leased.fences = [Fence(set(f.tokens), f.job, f.node, f.why) for f in state.fences]
    leased.agents = dict.fromkeys(state.agents, state.now)
    leased.identities = dict(state.identities)
    leased.failed = set(state.failed)
    leased.tokens = state.tokens
    leased.issued = state.issued
    leased.draining = state.draining
    leased.timeline.extend(history.timeline)
    leased.outcomes.update({(phase, how): count for phase, how, count in state.outcomes})
    for record in state.jobs:
        if (running := record.running) is not None:
            leased.programs.add(record.spec.id, running.left)
    jobs = sorted(state.scheduler.jobs, key=lambda job: leased.jobs[job.spec.id].number)
    groups = sorted(state.scheduler.groups, key=lambda group: group.id)
    leased.scheduler.restore(replace(state.scheduler, jobs=jobs, groups=groups))
    return leased
