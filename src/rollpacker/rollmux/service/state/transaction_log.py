"""The writer's view of the store and the scheduler: events go into both in one transaction.

A start reads the state. Entries are only history, and answers to repeated requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from rollpacker import __version__
from rollpacker.core.codec import dumps, dumps_finite, load, loads, plain
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.inventory import Machine
from rollpacker.rollmux.model.seat import NEVER
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service.state import daemon_events, format_1
from rollpacker.rollmux.service.state.clock import ClusterClock
from rollpacker.rollmux.service.state.forecaster import Forecaster
from rollpacker.rollmux.service.state.leased_scheduler import TIMELINE, LeasedScheduler
from rollpacker.rollmux.service.state.records import Fence, JobRecord, Lease, Stretch
from rollpacker.rollmux.service.state.state_record import (
    History,
    Pieces,
    decode,
    encode,
    restored,
    state_of,
)
from rollpacker.rollmux.service.store import (
    FORMAT,
    Changes,
    Entry,
    Store,
    StoreError,
    UnavailableError,
)
from rollpacker.rollmux.simulation.forecast import ExpectedStart

_log = logging.getLogger(__name__)
Due = tuple[str, object]  # a due event: its kind and its subject
_TIME: Due = ("passing of", "time")
_LONGEST_PAUSE_S = 60.0
"""Longest pause before an event on which the scheduler failed is tried again."""


class Poisoned(Exception):  # noqa: N818 - the event is at fault, not the daemon
    """The scheduler failed on an event. Undo everything since the last commit."""


@dataclass(slots=True)
class Setback:
    """A due event on which the scheduler failed. It is tried again at ``until``."""

    count: int
    until: float


class TransactionLog:
    """The daemon's core, used by the writer thread.

    Args:
        settings: settings of the scheduler (None for those of the store).
        ttl: seconds of a lease.
        machines: known nodes. New ones join.

    Raises:
        StoreError: this version cannot read the store's state.
    """

    def __init__(
        self,
        store: Store,
        settings: Settings | None,
        ttl: float,
        monotonic: Callable[[], float] = time.monotonic,
        machines: Sequence[Machine] = (),
    ) -> None:
        self.store = store
        self.settings, saved = _settings(store, settings)
        self.ttl = ttl
        self.setbacks: dict[Due, Setback] = {}
        self.leased = _opened(store, self.settings, ttl, saved)
        self._pieces = Pieces({name: text.encode() for name, text in store.state().items()})
        self._ended = len(self.leased.ended)  # number of ended jobs in the store
        self._closed: list[Stretch] = []
        self._entries: list[Entry] = []
        self._heard: tuple[dict[int, Lease], dict[str, float]] = ({}, {})
        """Leases and agents at the last commit, with their present times."""
        self._keys: dict[str, Entry] = {}
        self._forecaster = Forecaster(self.settings)
        self._queue: tuple[int, list[str]] = (-1, [])
        self.clock = ClusterClock(saved, self.leased.now, monotonic)
        if "clock_offset" in saved:  # not the first start
            self.leased.begin_epoch(time.time() - float(saved["created"]))
        if saved.get("restored") or store.lost:
            saved["restored"] = "yes"
            self.leased.quiet_until = self.now() + ttl
            _log.warning(
                "the database is an older copy or its end is lost%s, so no permit is granted for "
                "%g s",
                f" ({store.lost} answered entries)" if store.lost else "",
                ttl,
            )
        self.leased.renew(self.now())
        restored = {"restored": saved.get("restored", "")}
        store.set_meta(self.clock.save() | {"version": __version__} | restored)
        store.set_closed(False)
        for machine in machines:
            if machine.name not in self.leased.slots:
                self.record(ev.NodeJoined(machine=machine))
        self.commit()

    def now(self) -> float:
        """Seconds on the cluster's clock, never before the last entry."""
        return max(self.clock.now(), self.leased.now)

    def find(self, key: str) -> Entry | None:
        return self._keys.get(key) or self.store.find(key)

    def record(
        self,
        event: daemon_events.Recorded,
        *,
        key: str | None = None,
        request: str = "",
        status: int = 200,
        answer: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Entry:
        """Apply and record an event. Then ``answer`` makes the answer.

        Raises ``Poisoned`` if the scheduler fails on it.
        """
        seq, now = self.leased.seq + 1, self.now()
        if not self._entries:
            self._heard = dict(self.leased.leases), dict(self.leased.agents)
        try:
            effects = self.leased.apply(seq, now, event, key)
        except Exception as error:
            raise Poisoned(f"{type(event).__name__}: {type(error).__name__}: {error}") from error
        entry = Entry(
            seq=seq,
            t=now,
            wall_s=round(time.time(), 3),
            key=key,
            request=request,
            event=daemon_events.encode(event),
            decisions=daemon_events.encode(effects.decisions),
            status=status,
            answer=None if answer is None else dumps(answer()).decode(),
        )
        self._entries.append(entry)
        if key is not None:
            self._keys[key] = entry
        self._closed.extend(effects.closed)
        return entry

    def commit(self) -> int:
        """Write the recorded entries and return their number. Raises ``UnavailableError``."""
        count = len(self._entries)
        if count:
            difference = self._pieces.difference(state_of(self.leased))
            ended = [self.leased.jobs[name] for name in self.leased.ended[self._ended :]]
            self.store.append(
                Changes(
                    entries=self._entries,
                    state={name: text.decode() for name, text in difference.changed.items()},
                    gone=difference.gone,
                    ended=[dumps_finite(record).decode() for record in ended],
                    timeline=[dumps_finite(stretch).decode() for stretch in self._closed],
                )
            )
            self._pieces.accept(difference)
            self._ended = len(self.leased.ended)
            self._entries, self._keys, self._closed = [], {}, []
            self._heard = dict(self.leased.leases), dict(self.leased.agents)
        return count

    def undo(self) -> None:
        """Return to the last commit, since the scheduler failed on a later event.

        Jobs and nodes were heard meanwhile, so their times are kept.
        """
        before = self.leased
        ended = [before.jobs[name] for name in before.ended[: self._ended]]
        timeline = list(before.timeline)[: len(before.timeline) - len(self._closed)]
        self.leased = restored(
            decode(self._pieces.written), History(ended, timeline), self.settings, self.ttl
        )
        self._entries, self._keys, self._closed = [], {}, []
        self._queue = (-1, [])
        self.leased.quiet_until = before.quiet_until
        self.leased.renew(self.now())
        leases, agents = self._heard
        for token in self.leased.leases.keys() & leases.keys():
            lease, old = self.leased.leases[token], leases[token]
            lease.deadline, lease.beat = old.deadline, old.beat
            if lease.deadline == inf:
                self.leased.over(token)
        for node in self.leased.agents.keys() & agents.keys():
            self.leased.agents[node] = max(agents[node], before.agents.get(node, 0.0))
        self._heard = dict(self.leased.leases), dict(self.leased.agents)

    def expire(self) -> None:
        """Handle expired leases, silent agents, and events that waited for them or for time.

        An event on which the scheduler fails is delayed, longer each time, so that the next call
        handles the others. Raises that error.
        """
        now, leased = self.now(), self.leased
        due = set[Due]()
        if self.quiet and leased.quiet_until <= now:
            self._be_heard()
        for lease in [each for each in leased.leases.values() if each.deadline <= now]:
            self._try(due, now, ("permit", lease.token), partial(self._run_out, lease))
        silent = f"its agent was silent for {self.ttl:g} s"
        for node in [n for n, seen in leased.agents.items() if seen + self.ttl <= now]:
            self._try(due, now, ("node", node), partial(self.fail_node, node, silent))
        while fence := next((f for f in leased.fences if f.ready and _name(f) not in due), None):
            self._try(due, now, _name(fence), partial(self._release, fence))
        if leased.scheduler.next_look() <= now:
            self._try(due, now, _TIME, partial(self.record, ev.TimePassed()))
        self.setbacks = {what: each for what, each in self.setbacks.items() if what in due}

    @property
    def quiet(self) -> bool:
        """Whether permits are withheld because the database was restored from a copy."""
        return self.leased.quiet_until > 0.0

    def _be_heard(self) -> None:
        """Permits of the lost history have expired by their holders' clocks."""
        self.store.set_meta({"restored": ""})
        self.leased.quiet_until = 0.0
        self.leased.touched.update(lease.job for lease in self.leased.leases.values())

    def _try(self, due: set[Due], now: float, what: Due, act: Callable[[], object]) -> None:
        before = self.setbacks.get(what)
        due.add(what)
        if before is not None and before.until > now:
            return
        try:
            act()
        except (UnavailableError, StoreError):
            raise
        except Exception:
            count = 1 if before is None else before.count + 1
            pause = min(2.0 ** (count - 1), _LONGEST_PAUSE_S)
            self.setbacks[what] = Setback(count, now + pause)
            _log.exception("%s %s: the scheduler failed, and tries again in %.0f s", *what, pause)
            raise
        self.setbacks.pop(what, None)

    def _run_out(self, lease: Lease) -> None:
        if lease.fenced:
            self.leased.over(lease.token)
        else:
            self.record(ev.PermitLost(job=lease.job, token=lease.token))

    def follow(self, before: TransactionLog) -> None:
        """Take over the state that no log holds from a closed core."""
        self.setbacks = before.setbacks
        self._forecaster = before._forecaster

    def forecast(self) -> dict[str, ExpectedStart]:
        return self._forecaster.look(self.leased.scheduler, self.now())

    def queue(self) -> list[str]:
        """Jobs that wait for nodes, the next one first (cached until the next event)."""
        if self._queue[0] != self.leased.seq:
            waiting = self.leased.scheduler.queue.waiting(self.now())
            self._queue = self.leased.seq, [job.spec.id for job in waiting]
        return self._queue[1]

    def release_fences(self, token: int) -> None:
        """Send events that waited for this ended permit only. ``expire`` sends the others."""
        waited = [f for f in self.leased.fences if token in f.fenced and f.ready]
        for fence in waited:
            self._release(fence)

    def _release(self, fence: Fence) -> None:
        if fence.node is not None:
            self.record(ev.NodeFailed(node=fence.node, why=fence.why))
        elif fence.job is not None:
            self.record(ev.JobEnded(job=fence.job))

    def fail_node(self, node: str, why: str, **request: Any) -> Entry | None:
        """A node has failed. Returns None if this is known, or the node was given back."""
        slot = self.leased.slots.get(node)
        down = slot is not None and slot.status == "down"
        given_back = slot is None and not self.leased.needs(node)
        if given_back or down or self.leased.fails(node):
            self.leased.forget_agent(node)
            return None
        jobs = self.leased.hit_by(node)
        tokens = [token for job in jobs if (token := self.leased.jobs[job].token) is not None]
        if tokens:
            fenced = daemon_events.NodeFenced(node=node, tokens=tuple(tokens), why=why)
            return self.record(fenced, **request)
        return self.record(ev.NodeFailed(node=node, why=why), **request)

    def next_deadline(self) -> float | None:
        """Seconds until something expires or is due (None for never)."""
        times = [self._when(("permit", n), x.deadline) for n, x in self.leased.leases.items()]
        times.extend(self._when(("node", n), t + self.ttl) for n, t in self.leased.agents.items())
        times.extend(self._when(_name(fence), 0.0) for fence in self.leased.fences if fence.ready)
        times.extend([self.leased.quiet_until] if self.quiet else [])
        if (look := self.leased.scheduler.next_look()) < NEVER:
            times.append(self._when(_TIME, look))
        return max(min(times) - self.now(), 0.0) if times else None

    def _when(self, what: Due, due: float) -> float:
        back = self.setbacks.get(what)
        return due if back is None else max(due, back.until)

    def close(self) -> None:
        """Close the store and end the forecast process."""
        self._forecaster.close()
        self.store.close()


def _name(fence: Fence) -> Due:
    return ("end of job", fence.job) if fence.node is None else ("failure of node", fence.node)


def _opened(store: Store, settings: Settings, ttl: float, saved: dict[str, str]) -> LeasedScheduler:
    if saved["format"] != FORMAT:
        leased = format_1.leased_of(store, settings, ttl)
        first = next(store.entries(), None)
        saved["created"] = repr(time.time() if first is None else first.wall_s)
        store.convert(_everything(leased), saved["created"])
        return leased
    pieces = store.state()
    if not pieces:
        leased = LeasedScheduler(settings, ttl)
        store.append(_everything(leased))
        return leased
    try:
        ended = [load(loads(text), JobRecord) for text in store.ended()]
        timeline = [load(loads(text), Stretch) for text in store.timeline(TIMELINE)]
        return restored(decode(pieces), History(ended, timeline), settings, ttl)
    except (ValueError, LookupError) as error:
        raise StoreError(
            f"the state in the database cannot be read by version {__version__}, version "
            f"{saved.get('version', 'unknown')} made it: {type(error).__name__}: {error}"
        ) from error


def _everything(leased: LeasedScheduler) -> Changes:
    return Changes(
        state={name: piece.decode() for name, piece in encode(state_of(leased)).items()},
        ended=[dumps_finite(leased.jobs[name]).decode() for name in leased.ended],
        timeline=[dumps_finite(stretch).decode() for stretch in leased.timeline],
    )


def _settings(store: Store, wanted: Settings | None) -> tuple[Settings, dict[str, str]]:
    """The settings to run with, and the store's meta, both written to a new store."""
    saved = store.meta()
    if not saved:
        settings = wanted or Settings()
        first = {"format": FORMAT, "version": __version__, "settings": dumps(settings).decode()}
        first["created"] = repr(time.time())
        store.set_meta(first)
        return settings, first
    if saved.get("format") not in (FORMAT, "1"):
        raise StoreError(f"the database has format {saved.get('format')!r}, expected {FORMAT!r}")
    settings = load(loads(saved["settings"]), Settings)
    if wanted is not None and wanted != settings:
        raise StoreError(
            "the database was made with other scheduler settings: "
            f"{'; '.join(_differences(settings, wanted))}. Start without --inventory and "
            "--settings to use its own, or drain and start a new state folder"
        )
    return settings, saved


def _differences(stored: Settings, wanted: Settings) -> Iterator[str]:
    old, new = _by_key(stored), _by_key(wanted)
    for key in dict.fromkeys((*old, *new)):
        if old.get(key) != new.get(key):
            there, here = (
                dumps(each[key]).decode() if key in each else "not" for each in (old, new)
            )
            yield f"{key} is {there} there, {here} here"
    if old == new:
        yield "teams have another order"


def _by_key(settings: Settings) -> dict[str, Any]:
    keys = plain(settings)
    teams = {f"team {team.pop('name')}": team for team in keys.pop("teams")}
    return keys | teams
