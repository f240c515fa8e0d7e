"""The scheduler at a start: from the newest good snapshot and the entries after it, or from all."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker import __version__
from rollpacker.core.codec import loads
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service.state import daemon_events, state_record
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.snapshots import ended_before, fault
from rollpacker.rollmux.service.store import Entry, Store, StoredSnapshot, StoreError, chained

_log = logging.getLogger(__name__)


class ContradictionError(StoreError):
    """What is written is not what the scheduler makes of the same events."""


@dataclass(slots=True)
class Recovered:
    """A leased scheduler, and how it came to be.

    Args:
        digest: of the last entry.
        base: the snapshot that it began with.
        counted: jobs that had ended by then.
        replayed: entries that were read.
        worked_s: seconds that this took.
    """

    leased: LeasedScheduler
    digest: str = ""
    base: StoredSnapshot | None = None
    counted: int = 0
    replayed: int = 0
    worked_s: float = 0.0


def recover(store: Store, settings: Settings, ttl: float, saved: Mapping[str, str]) -> Recovered:
    """The scheduler that the store's entries lead to, by as little reading as will do.

    A snapshot that is no good, or that entries after it contradict, is passed over for the one
    before it, and at last for the whole log.

    Args:
        saved: the store's meta.

    Raises:
        StoreError: the store was altered, or the scheduler now decides otherwise.
    """
    for snapshot in store.snapshots():
        try:
            found = _restored(store, snapshot, settings, ttl)
            return _replayed(found, store, saved)
        except _PassedOverError as why:
            _log.warning("the snapshot of entry %d is passed over: %s", snapshot.seq, why)
        except ContradictionError as why:
            _log.warning("the snapshot of entry %d leads elsewhere: %s", snapshot.seq, why)
    return _replayed(Recovered(LeasedScheduler(settings, ttl)), store, saved)


def verify(store: Store, settings: Settings, ttl: float, saved: Mapping[str, str]) -> Recovered:
    """As ``recover``, from the first entry; snapshots are only compared with what comes out.

    Raises ``StoreError`` where one of this version is not what its entries lead to, too.
    """
    good = [each for each in store.snapshots() if fault(store, each) is None]
    return _replayed(
        Recovered(LeasedScheduler(settings, ttl)), store, saved, {s.seq: s for s in good}
    )


class _PassedOverError(Exception):
    """A snapshot cannot be used."""


def _restored(store: Store, snapshot: StoredSnapshot, settings: Settings, ttl: float) -> Recovered:
    if (why := fault(store, snapshot)) is not None:
        raise _PassedOverError(why)
    try:
        state = state_record.decode(snapshot.state)
        leased = state_record.restored(state, ended_before(store, snapshot), settings, ttl)
    except (ValueError, LookupError, StoreError) as error:
        raise _PassedOverError(f"{type(error).__name__}: {error}") from error
    return Recovered(leased, snapshot.digest, snapshot, len(leased.ended))


def _replayed(
    found: Recovered,
    store: Store,
    saved: Mapping[str, str],
    snapshots: Mapping[int, StoredSnapshot] | None = None,
) -> Recovered:
    """With the entries after it, and each decision compared."""
    began, leased = time.perf_counter(), found.leased
    for entry in chained(store.entries(leased.seq), found.digest, leased.seq):
        _apply(leased, entry, saved)
        found.digest = entry.digest
        found.replayed += 1
        if snapshots and entry.seq in snapshots:
            _compare(store, snapshots[entry.seq], leased)
    live = {token: lease.job for token, lease in leased.leases.items()}
    if live != store.live():
        raise ContradictionError("the permits in the database are not those of its entries")
    leased.touched.clear()
    found.worked_s = time.perf_counter() - began
    return found


def _apply(leased: LeasedScheduler, entry: Entry, saved: Mapping[str, str]) -> None:
    event = daemon_events.decode(entry.event)
    try:
        effects = leased.apply(entry.seq, entry.t, event, entry.key)
        made = daemon_events.encode(effects.decisions)
        same = loads(made) == loads(entry.decisions)
    except Exception as error:
        made, same = f"{type(error).__name__}: {error}", False
    if not same:
        written = saved.get("version", "unknown")
        raise ContradictionError(
            f"entry {entry.seq} ({type(event).__name__}): the scheduler now decides "
            f"otherwise; the database was made by version {written}, this is "
            f"{__version__}: drain with that version first. Written: "
            f"{entry.decisions[:200]}; now: {made[:200]}"
        )


def _compare(store: Store, snapshot: StoredSnapshot, leased: LeasedScheduler) -> None:
    state = loads(state_record.encode(state_record.state_of(leased)))
    gone = [leased.jobs[name] for name in leased.ended]
    if state != loads(snapshot.state) or gone != ended_before(store, snapshot):
        raise StoreError(f"the snapshot of entry {snapshot.seq} is not what entries lead to")
