"""The log on disk, append-only, with the answers that were given: one SQLite file.

A store knows no meaning of what it keeps. Write-ahead log, a full sync at every commit, one writer
by file lock.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

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
_REMOTE = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre", "afs", "ncp")


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


class Store:
    """Durable: what ``append`` returned from survives a crash of the machine. One writer.

    Args:
        path: of the database; ``path`` with ``.lock`` behind it is the lock file.
        check: look for damage also where the last daemon left in good order.

    Raises:
        StoreError: another daemon has it, the disk is remote, or the file is damaged.
    """

    def __init__(self, path: Path, check: bool = False) -> None:
        self._path = path
        _refuse_remote(path.parent)
        self._lock = _locked(path.with_name(path.name + ".lock"))
        try:
            self._db = _connected(path, "rwc")
            self._prepare(check)
            with self._transaction():
                for statement in TABLES:
                    self._db.execute(statement)
        except (sqlite3.Error, UnavailableError) as error:
            os.close(self._lock)
            raise StoreError(f"{path}: cannot be used as a database: {error}") from error
        except StoreError:
            os.close(self._lock)
            raise

    def _prepare(self, check: bool) -> None:
        found = "ok"
        if check or not self._closed():
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreError(
                f"{self._path}: the database is damaged ({found}); put back a copy or move it away"
            )
        mode = self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"{self._path}: no write-ahead log here (journal mode {mode})")
        self._db.execute("PRAGMA synchronous=FULL")

    def _closed(self) -> bool:
        """Whether the last daemon said so: reading it all takes long where it is large."""
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return False
        return self.meta().get("closed") == "yes"

    def reader(self) -> Store:
        """Another connection, which only reads."""
        reader = object.__new__(Store)
        reader._path, reader._lock = self._path, -1
        reader._db = _connected(self._path, "ro")
        return reader

    def close(self) -> None:
        """Let go of the connection and of the lock."""
        self._db.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _read(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise UnavailableError(f"the database cannot be used: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commit at the end, roll back on an error."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise UnavailableError(f"the database cannot be written: {error}") from error

    def meta(self) -> dict[str, str]:
        """Format, settings, clock."""
        return dict(self._read("SELECT name, value FROM meta"))

    def set_meta(self, values: Mapping[str, str]) -> None:
        """Write some of it, in a transaction of its own."""
        sql = (
            "INSERT INTO meta (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        with self._transaction():
            self._db.executemany(sql, list(values.items()))

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
        with self._transaction():
            rows = [_ROW(entry) for entry in entries]
            self._db.executemany(f"INSERT INTO entries ({_COLUMNS}) VALUES ({marks})", rows)
            sql = "INSERT INTO permits (token, job, phase, seq) VALUES (?, ?, ?, ?)"
            self._db.executemany(sql, grants)
            self._db.executemany(
                "UPDATE permits SET ended = ? WHERE token = ?",
                [(seq, token) for token, seq in ends.items()],
            )

    def find(self, key: str) -> Entry | None:
        """The entry of an idempotency key."""
        rows = self._read(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,))
        return _entry(rows[0]) if rows else None

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries after a sequence number, in order, a page at a time."""
        sql = f"SELECT {_COLUMNS} FROM entries WHERE seq > ? ORDER BY seq LIMIT {_PAGE}"
        while rows := self._read(sql, (after,)):
            for row in rows:
                yield _entry(row)
            after = rows[-1][0]

    def digest(self, seq: int) -> str | None:
        """Of an entry; None where there is none."""
        rows = self._read("SELECT digest FROM entries WHERE seq = ?", (seq,))
        return rows[0][0] if rows else None

    def add_snapshot(self, snapshot: StoredSnapshot, ended: str, before: int, keep: int) -> None:
        """One transaction: a snapshot, and the jobs that ended since an earlier one.

        Of snapshots and ended jobs that stand between the two, or after, nobody knows what they
        are: they are deleted; so are all snapshots but the newest ``keep``.

        Args:
            before: entry of the earlier one; 0 for none.

        Raises ``UnavailableError``.
        """
        with self._transaction():
            self._db.execute("DELETE FROM snapshots WHERE seq > ?", (before,))
            self._db.execute("DELETE FROM ended_jobs WHERE seq > ?", (before,))
            self._db.execute("INSERT INTO ended_jobs VALUES (?, ?)", (snapshot.seq, ended))
            self._db.execute("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?)", snapshot)
            self._db.execute(
                "DELETE FROM snapshots WHERE seq NOT IN"
                f" (SELECT seq FROM snapshots ORDER BY seq DESC LIMIT {keep})"
            )

    def snapshots(self) -> list[StoredSnapshot]:
        """The newest first."""
        columns = ", ".join(StoredSnapshot._fields)
        rows = self._read(f"SELECT {columns} FROM snapshots ORDER BY seq DESC")
        return [StoredSnapshot(*row) for row in rows]

    def ended_jobs(self, seq: int) -> list[str]:
        """What ``add_snapshot`` was given, up to a snapshot."""
        rows = self._read("SELECT jobs FROM ended_jobs WHERE seq <= ? ORDER BY seq", (seq,))
        return [row[0] for row in rows]

    def live(self) -> dict[int, str]:
        """Token and job of every permit that has not ended."""
        return dict(self._read("SELECT token, job FROM permits WHERE ended IS NULL"))


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


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.resolve().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=5.0,
    )


def _locked(path: Path) -> int:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise StoreError(f"{path}: another daemon is running on this database") from error
    return handle


def _refuse_remote(folder: Path) -> None:
    """File locks and syncs of remote file systems are not to be trusted."""
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return
    where = folder.resolve()
    best, kind = Path("/"), ""
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split()
        point = Path(fields[1].replace("\\040", " "))
        if where.is_relative_to(point) and len(point.parts) >= len(best.parts):
            best, kind = point, fields[2]
    if kind.startswith(_REMOTE):
        raise StoreError(f"{folder}: is on {kind}; the database needs a local disk (--state)")
