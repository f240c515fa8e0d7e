"""The store: an append-only log of what happened, with the answers that were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

FORMAT = "1"
TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS entries (seq BIGINT PRIMARY KEY, t DOUBLE PRECISION NOT NULL,"
    " wall_s DOUBLE PRECISION NOT NULL, key TEXT UNIQUE, request TEXT NOT NULL,"
    " event TEXT NOT NULL, decisions TEXT NOT NULL, status INTEGER NOT NULL, answer TEXT,"
    " digest TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS permits (token BIGINT PRIMARY KEY, job TEXT NOT NULL,"
    " phase TEXT NOT NULL, seq BIGINT NOT NULL, ended BIGINT)",
    "CREATE INDEX IF NOT EXISTS live_permits ON permits (token) WHERE ended IS NULL",
    "CREATE TABLE IF NOT EXISTS snapshots (seq BIGINT PRIMARY KEY, digest TEXT NOT NULL,"
    " version TEXT NOT NULL, ended TEXT NOT NULL, state TEXT NOT NULL, checksum TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS ended_jobs (seq BIGINT PRIMARY KEY, jobs TEXT NOT NULL)",
)
_PAGE = 2000


class StoreError(RuntimeError):
    """The store cannot be opened, or does not hold what it should; the daemon must not start."""


class UnavailableError(RuntimeError):
    """A transaction did not go through, or nobody knows; ask the store again what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event with everything that was decided and answered because of it.

    Args:
        seq: 1, 2, 3, ...
        t: seconds on the cluster's clock.
        wall_s: of the wall clock, for people only.
        key: idempotency key of the request; None for what the daemon found out itself.
        request: fingerprint of the request.
        event, decisions: JSON.
        status, answer: of HTTP; ``answer`` is JSON, or None where the answer is the permit.
        digest: of this entry and, through its predecessor's, of all before it.
    """

    seq: int
    t: float
    wall_s: float
    key: str | None
    request: str
    event: str
    decisions: str
    status: int
    answer: str | None
    digest: str = ""

    def sealed(self, previous: str) -> Entry:
        """With its digest, given that of the entry before."""
        parts = (
            previous,
            str(self.seq),
            repr(self.t),
            repr(self.wall_s),
            self.key or "",
            self.request,
            self.event,
            self.decisions,
            str(self.status),
            "" if self.answer is None else "=" + self.answer,
        )
        text = "\0".join(parts).encode()
        return replace(self, digest=blake2b(text, digest_size=16).hexdigest())


class Grant(NamedTuple):
    """A permit as the store knows it: its fencing token, and the entry that issued it."""

    token: int
    job: str
    phase: str
    seq: int


_NAMES = tuple(each.name for each in fields(Entry))
_COLUMNS = ", ".join(_NAMES)
_ROW = attrgetter(*_NAMES)


class StoredSnapshot(NamedTuple):
    """The state after an entry, as it is stored.

    Args:
        digest: of that entry.
        version: of the code and of the form of ``state``.
        ended: digest of the jobs that had ended, which ``ended_jobs`` holds.
        checksum: of all this.
    """

    seq: int
    digest: str
    version: str
    ended: str
    state: str
    checksum: str


class Database(Protocol):
    """What the statements run on; ``?`` stands for a parameter."""

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        """Execute; the rows, if any."""
        ...

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Execute once for each row."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Commit at the end, roll back on an exception."""
        ...


class Store:
    """Durable: what ``append`` returned from survives a crash of the machine. One writer.

    The statements that SQLite and Postgres have in common, over a connection; by itself it can
    only read.
    """

    def __init__(self, connection: Database) -> None:
        self._db = connection

    def reader(self) -> Store:
        """Another connection, which only reads; of a reader itself."""
        return self

    def close(self) -> None:
        """Let go of the connection and of the lock."""
        self._db.close()

    def create(self) -> None:
        """Make the tables where they are missing."""
        with self._db.transaction():
            for statement in TABLES:
                self._db.run(statement)

    def meta(self) -> dict[str, str]:
        """Format, settings, clock."""
        return dict(self._db.run("SELECT name, value FROM meta"))

    def set_meta(self, values: Mapping[str, str]) -> None:
        """Write some of it, in a transaction of its own."""
        sql = (
            "INSERT INTO meta (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        with self._db.transaction():
            self._db.run_many(sql, list(values.items()))

    def set_closed(self, closed: bool) -> None:
        """Whether the last daemon left in good order; one that runs has not."""
        self.set_meta({"closed": "yes" if closed else ""})

    def append(
        self, entries: Sequence[Entry], grants: Sequence[Grant], ends: Mapping[int, int]
    ) -> None:
        """One transaction: entries, permits issued, and ``token -> seq`` of permits that ended.

        Raises ``UnavailableError`` where it is not certain that all of it is on disk.
        """
        marks = ", ".join("?" * len(_NAMES))
        with self._db.transaction():
            rows = [_ROW(entry) for entry in entries]
            self._db.run_many(f"INSERT INTO entries ({_COLUMNS}) VALUES ({marks})", rows)
            sql = "INSERT INTO permits (token, job, phase, seq) VALUES (?, ?, ?, ?)"
            self._db.run_many(sql, grants)
            self._db.run_many(
                "UPDATE permits SET ended = ? WHERE token = ?",
                [(seq, token) for token, seq in ends.items()],
            )

    def find(self, key: str) -> Entry | None:
        """The entry of an idempotency key."""
        rows = self._db.run(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,))
        return _entry(rows[0]) if rows else None

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries after a sequence number, in order, a page at a time."""
        sql = f"SELECT {_COLUMNS} FROM entries WHERE seq > ? ORDER BY seq LIMIT {_PAGE}"
        while rows := self._db.run(sql, (after,)):
            for row in rows:
                yield _entry(row)
            after = rows[-1][0]

    def digest(self, seq: int) -> str | None:
        """Of an entry; None where there is none."""
        rows = self._db.run("SELECT digest FROM entries WHERE seq = ?", (seq,))
        return rows[0][0] if rows else None

    def add_snapshot(self, snapshot: StoredSnapshot, ended: str, before: int, keep: int) -> None:
        """One transaction: a snapshot, and the jobs that ended since an earlier one.

        Of snapshots and ended jobs that stand between the two, or after, nobody knows what they
        are: they are deleted; so are all snapshots but the newest ``keep``.

        Args:
            before: entry of the earlier one; 0 for none.

        Raises ``UnavailableError``.
        """
        with self._db.transaction():
            self._db.run("DELETE FROM snapshots WHERE seq > ?", (before,))
            self._db.run("DELETE FROM ended_jobs WHERE seq > ?", (before,))
            self._db.run("INSERT INTO ended_jobs VALUES (?, ?)", (snapshot.seq, ended))
            self._db.run("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", snapshot)
            self._db.run(
                "DELETE FROM snapshots WHERE seq NOT IN"
                f" (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT {keep})"
            )

    def snapshots(self) -> list[StoredSnapshot]:
        """The newest first."""
        columns = ", ".join(StoredSnapshot._fields)
        rows = self._db.run(f"SELECT {columns} FROM snapshots ORDER BY seq DESC")
        return [StoredSnapshot(*row) for row in rows]

    def ended_jobs(self, seq: int) -> list[str]:
        """What ``add_snapshot`` was given, up to a snapshot."""
        rows = self._db.run("SELECT jobs FROM ended_jobs WHERE seq <= ? ORDER BY seq", (seq,))
        return [row[0] for row in rows]

    def live(self) -> dict[int, str]:
        """Token and job of every permit that has not ended."""
        return dict(self._db.run("SELECT token, job FROM permits WHERE ended IS NULL"))


def _entry(row: Sequence[Any]) -> Entry:
    return Entry(**dict(zip(_NAMES, row, strict=True)))


def chained(entries: Iterator[Entry], previous: str = "", seq: int = 0) -> Iterator[Entry]:
    """The same entries, each checked against the chain. Raises ``StoreError`` on a break."""
    for entry in entries:
        if entry.seq != seq + 1:
            raise StoreError(f"entry {seq + 1} is missing, the next one is {entry.seq}")
        if entry.sealed(previous).digest != entry.digest:
            raise StoreError(f"entry {entry.seq} was altered: its digest does not fit")
        previous, seq = entry.digest, entry.seq
        yield entry
