"""Snapshots of the scheduler: when one is due, how it is sealed, whether it is good."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from hashlib import blake2b

from rollpacker import __version__
from rollpacker.rollmux.service.state import state_record
from rollpacker.rollmux.service.state.leased_scheduler import LeasedScheduler
from rollpacker.rollmux.service.state.records import JobRecord
from rollpacker.rollmux.service.store import Store, StoredSnapshot, StoreError

_log = logging.getLogger(__name__)

FORM = "4"
"""Of the state in a snapshot: another number with every change of it."""
VERSION = f"{__version__}/{FORM}"
KEPT = 2
EVERY = 20_000
"""Entries after which the next one is due."""
EVERY_S = 3.0
"""Seconds of work of the scheduler after which it is: what a start has to do again."""
COST = 20.0
"""Writing one may take a share of this work of one in so many."""
AT_STOP = 300
"""New entries for which one is written at an orderly stop."""


def chain(ended: Iterable[str], digest: str = "") -> str:
    """The digest of ended jobs, given that of those before them."""
    for text in ended:
        digest = blake2b(f"{digest}\0{text}".encode(), digest_size=16).hexdigest()
    return digest


def sealed(seq: int, digest: str, ended: str, state: str) -> StoredSnapshot:
    """A snapshot of this version."""
    text = "\0".join((str(seq), digest, VERSION, ended, state)).encode()
    checksum = blake2b(text, digest_size=16).hexdigest()
    return StoredSnapshot(seq, digest, VERSION, ended, state, checksum)


def fault(store: Store, found: StoredSnapshot) -> str | None:
    """Why a snapshot cannot be used, or None."""
    if found.version != VERSION:
        return f"it was made by version {found.version}"
    if found != sealed(found.seq, found.digest, found.ended, found.state):
        return "it is damaged"
    if store.digest(found.seq) != found.digest:
        return "it belongs to other entries"
    return None


def ended_before(store: Store, snapshot: StoredSnapshot) -> list[JobRecord]:
    """The jobs that had ended, in that order. Raises ``StoreError`` where some are altered."""
    texts = store.ended_jobs(snapshot.seq)
    if chain(texts) != snapshot.ended:
        raise StoreError(f"ended jobs before entry {snapshot.seq} were altered")
    return [record for text in texts for record in state_record.ended_jobs(text)]


class SnapshotWriter:
    """Writes snapshots of one scheduler as it goes on.

    Args:
        base: the last snapshot of what this one was; None for none.
        count: jobs that it knew to have ended.
        worked_s: seconds of work of the scheduler since.
    """

    def __init__(
        self, store: Store, base: StoredSnapshot | None, count: int, worked_s: float
    ) -> None:
        self._store = store
        self._seq, self._ended = (0, "") if base is None else (base.seq, base.ended)
        self._count = count
        self._tried = self._seq
        self.worked_s = worked_s
        self.longest_s = 0.0
        """That anybody waited for one."""
        self._last_s = 0.0

    def due(self, seq: int) -> bool:
        """Whether it is time for the next one."""
        return seq - self._tried >= EVERY or self.worked_s > max(EVERY_S, COST * self._last_s)

    def due_at_stop(self, seq: int) -> bool:
        """Whether one is worth it when the daemon stops."""
        return seq - self._seq >= AT_STOP

    def keep(self, leased: LeasedScheduler, digest: str) -> None:
        """Write one of a scheduler after a committed entry; what cannot be written is left out."""
        if leased.seq == self._seq:
            return
        began = time.perf_counter()
        self._tried, self.worked_s = leased.seq, 0.0
        try:
            self._write(leased, digest)
        except Exception:
            # The log is whole without it.
            _log.exception("no snapshot of entry %d", leased.seq)
        self._last_s = time.perf_counter() - began
        self.longest_s = max(self.longest_s, self._last_s)

    def _write(self, leased: LeasedScheduler, digest: str) -> None:
        count = len(leased.ended)
        new = state_record.ended_since(leased, self._count)
        ended = chain([new], self._ended)
        state = state_record.encode(state_record.state_of(leased))
        made = sealed(leased.seq, digest, ended, state)
        self._store.add_snapshot(made, new, self._seq, KEPT)
        self._seq, self._ended, self._count = leased.seq, ended, count
