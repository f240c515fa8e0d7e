"""Converts a database of format 1, which had entries and occasional snapshots."""

from __future__ import annotations

import logging
from typing import Any

from rollpacker.core.codec import load, loads
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.records import JobRecord, Stretch
from rollpacker.rollmux.service.state.state_record import History, LeasedState, restored
from rollpacker.rollmux.service.store import Store, StoreError

_log = logging.getLogger(__name__)


def leased_of(store: Store, settings: Settings, ttl: float) -> LeasedScheduler:
    """The scheduler after the newest snapshot and later entries.

    Raises ``StoreError`` if this version cannot repeat an entry.
    """
    leased = LeasedScheduler(settings, ttl)
    found = store.snapshot_of_format_1()
    if found is not None:
        try:
            leased = _restored(*found, settings, ttl)
        except (ValueError, LookupError) as error:
            _log.warning("the snapshot of format 1 cannot be used (%s), so entries are read", error)
    for entry in store.entries(leased.seq):
        try:
            leased.apply(entry.seq, entry.t, daemon_events.decode(entry.event), entry.key)
        except Exception as error:
            raise StoreError(
                f"entry {entry.seq} of a database of format 1 cannot be repeated "
                f"({type(error).__name__}: {error}): open it with the version that wrote it. "
                "Let its jobs end, and start a new state folder"
            ) from error
    leased.touched.clear()
    return leased


def _restored(text: str, ended: list[str], settings: Settings, ttl: float) -> LeasedScheduler:
    data: dict[str, Any] = loads(text)
    records = [record for each in ended for record in load(loads(each), list[JobRecord])]
    timeline = load(data["timeline"], list[Stretch])
    return restored(load(data, LeasedState), History(records, timeline), settings, ttl)
