"""The daemon's state and history on disk: one SQLite file.

It uses a write-ahead log, a full sync at every commit, and a file lock for its single writer. A
store does not interpret its content.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

FORMAT = "2"
TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS entries (seq BIGINT PRIMARY KEY, t DOUBLE PRECISION NOT NULL,"
    " wall_s DOUBLE PRECISION NOT NULL, key TEXT UNIQUE, request TEXT NOT NULL,"
    " event TEXT NOT NULL, decisions TEXT NOT NULL, status INTEGER NOT NULL, answer TEXT)",
    "CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS ended (job TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS timeline (phase TEXT NOT NULL)",
)
_OLD_TABLES = ("permits", "snapshots", "ended_jobs")
"""Tables of format 1, which had no state beside its entries."""
_PAGE = 2000
_REMOTE = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre", "afs", "ncp")


class StoreError(RuntimeError):
    """The store cannot be opened or is damaged. The daemon must not start."""


class UnavailableError(RuntimeError):
    """A transaction failed or its outcome is unknown. Read the store again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One event with its decisions and its answer.

    Args:
        seq: 1, 2, 3, ...
        t: seconds on the cluster's clock.
        wall_s: wall-clock seconds, for users only.
        key: idempotency key of the request (None for the daemon's own events).
        request: fingerprint of the request.
        event, decisions: JSON.
        status, answer: of HTTP. ``answer`` is JSON, or None if the answer is the permit.
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


@dataclass(slots=True)
class Changes:
    """Additions to the history and changes of the state, in one transaction, as JSON.

    ``state`` has new or changed pieces by name, ``gone`` the names of removed ones.
    """

    entries: Sequence[Entry] = ()
    state: Mapping[str, str] = field(default_factory=dict[str, str])
    gone: Iterable[str] = ()
    ended: Sequence[str] = ()
    timeline: Sequence[str] = ()


_NAMES = tuple(each.name for each in fields(Entry))
_COLUMNS = ", ".join(_NAMES)
_ROW = attrgetter(*_NAMES)


class Store:
    """A durable store: appended changes survive a crash of the machine. It has one writer.

    Raises:
        StoreError: another daemon uses it, the disk is remote, or the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        _refuse_remote(path.parent)
        self._lock = _locked(path.with_name(path.name + ".lock"))
        try:
            self._db = _connected(path, "rwc")
            self._prepare()
            with self._transaction():
                for statement in TABLES:
                    self._db.execute(statement)
            self.lost = self._lost()
        except (sqlite3.Error, UnavailableError) as error:
            os.close(self._lock)
            raise StoreError(f"{path}: cannot be used as a database: {error}") from error
        except StoreError:
            os.close(self._lock)
            raise

    def _prepare(self) -> None:
        found = "ok"
        if not self._closed():
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreError(
                f"{self._path}: the database is damaged ({found}). Restore a copy or move it away"
            )
        if (later := _behind_damage(self._path, self._db)) > 1:
            raise StoreError(
                f"{self._path}-wal is damaged in its middle: {later} transactions after that are "
                "lost. Restore a backup with rollpacker mux restore, or continue without them: "
                f"rollpacker mux restore {self._path}"
            )
        mode = self._db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"{self._path}: no write-ahead log here (journal mode {mode})")
        self._db.execute("PRAGMA synchronous=FULL")

    def _lost(self) -> int:
        """Number of answered entries, by the lock file, that are missing in the database."""
        last = self._db.execute("SELECT max(seq) FROM entries").fetchone()[0] or 0
        noted = os.pread(self._lock, 20, 0).strip()
        self._note_last(last)
        return max(int(noted) - last, 0) if noted.isdigit() else 0

    def _closed(self) -> bool:
        """Whether the last daemon closed it. Checking a large database takes long."""
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return False
        return self.meta().get("closed") == "yes"

    def reader(self) -> Store:
        reader = object.__new__(Store)
        reader._path, reader._lock = self._path, -1
        reader._db = _connected(self._path, "ro")
        return reader

    def close(self) -> None:
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
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise UnavailableError(f"the database cannot be written: {error}") from error

    def meta(self) -> dict[str, str]:
        return dict(self._read("SELECT name, value FROM meta"))

    def set_meta(self, values: Mapping[str, str]) -> None:
        sql = (
            "INSERT INTO meta (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        with self._transaction():
            self._db.executemany(sql, list(values.items()))

    def set_closed(self, closed: bool) -> None:
        """Whether the last daemon ended in good order, so that no start searches for damage."""
        self.set_meta({"closed": "yes" if closed else ""})

    def append(self, changes: Changes) -> None:
        """Write one transaction. Raises ``UnavailableError`` if it may not be on disk."""
        with self._transaction():
            self._write(changes)
        if changes.entries:
            self._note_last(changes.entries[-1].seq)

    def _note_last(self, seq: int) -> None:
        """Note the last entry beside the database, so that a missing answered entry is noticed."""
        os.pwrite(self._lock, f"{seq:<20}\n".encode(), 0)

    def _write(self, changes: Changes) -> None:
        marks = ", ".join("?" * len(_NAMES))
        rows = [_ROW(entry) for entry in changes.entries]
        self._db.executemany(f"INSERT INTO entries ({_COLUMNS}) VALUES ({marks})", rows)
        sql = (
            "INSERT INTO state (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        self._db.executemany(sql, list(changes.state.items()))
        self._db.executemany("DELETE FROM state WHERE name = ?", [(x,) for x in changes.gone])
        self._db.executemany("INSERT INTO ended VALUES (?)", [(x,) for x in changes.ended])
        self._db.executemany("INSERT INTO timeline VALUES (?)", [(x,) for x in changes.timeline])

    def convert(self, changes: Changes, created: str) -> None:
        """Convert a database of format 1 to this format, in one transaction."""
        with self._transaction():
            for table in _OLD_TABLES:
                self._db.execute(f"DROP TABLE IF EXISTS {table}")
            self._db.execute("ALTER TABLE entries DROP COLUMN digest")
            self._db.execute("UPDATE meta SET value = ? WHERE name = 'format'", (FORMAT,))
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('created', ?)", (created,))
            self._write(changes)

    def snapshot_of_format_1(self) -> tuple[str, list[str]] | None:
        """The newest state of a daemon of format 1, and the lists of jobs ended by then."""
        found = self._read("SELECT seq, state FROM snapshots ORDER BY seq DESC LIMIT 1")
        if not found:
            return None
        seq, state = found[0]
        ended = self._read("SELECT jobs FROM ended_jobs WHERE seq <= ? ORDER BY seq", (seq,))
        return state, [row[0] for row in ended]

    def state(self) -> dict[str, str]:
        """The pieces of the state after the last entry, in the order in which they were new."""
        return dict(self._read("SELECT name, value FROM state ORDER BY rowid"))

    def ended(self) -> list[str]:
        return [row[0] for row in self._read("SELECT job FROM ended ORDER BY rowid")]

    def timeline(self, most: int) -> list[str]:
        rows = self._read("SELECT phase FROM timeline ORDER BY rowid DESC LIMIT ?", (most,))
        return [row[0] for row in reversed(rows)]

    def find(self, key: str) -> Entry | None:
        rows = self._read(f"SELECT {_COLUMNS} FROM entries WHERE key = ?", (key,))
        return _entry(rows[0]) if rows else None

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries after a sequence number, in order. They are read in pages."""
        sql = f"SELECT {_COLUMNS} FROM entries WHERE seq > ? ORDER BY seq LIMIT {_PAGE}"
        while rows := self._read(sql, (after,)):
            for row in rows:
                yield _entry(row)
            after = rows[-1][0]


def backup(path: Path, to: Path) -> int:
    """Copy a database into a new file, even while a daemon uses it. Returns its number of entries.

    Raises ``StoreError`` if there is no database, ``FileExistsError`` if the file exists.
    """
    if not path.exists():
        raise StoreError(f"{path}: there is no database")
    os.close(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(_connected(path, "rw")) as source, closing(_connected(to, "rw")) as copy:
            source.backup(copy)
            return copy.execute("SELECT count(*) FROM entries").fetchone()[0]
    except sqlite3.Error as error:
        to.unlink()
        raise StoreError(f"{path}: cannot be copied: {error}") from error


def restore(copy: Path, path: Path) -> int:
    """Replace a database that no daemon uses by a copy. Returns its number of entries.

    The next daemon waits for one lease before it grants a permit. Raises ``StoreError``.
    """
    lock = _locked(path.with_name(path.name + ".lock"))
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    try:
        count = backup(copy, new)
        with closing(_connected(new, "rw")) as db:
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise StoreError(f"{copy}: the copy is damaged ({found})")
            db.execute("INSERT OR REPLACE INTO meta VALUES ('restored', 'yes')")
        for name in ("-wal", "-shm"):
            path.with_name(path.name + name).unlink(missing_ok=True)
        new.replace(path)
        os.ftruncate(lock, 0)
    except sqlite3.Error as error:
        raise StoreError(f"{copy}: not a copy of a database: {error}") from error
    finally:
        new.unlink(missing_ok=True)
        os.close(lock)
    return count


def _behind_damage(path: Path, db: sqlite3.Connection) -> int:
    """Number of transactions in the write-ahead log that SQLite skips after a damaged frame.

    The last one may be an unanswered transaction of a crash.
    """
    wal = path.with_name(path.name + "-wal")
    if not wal.exists():
        return 0
    read = max(db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1], 0)
    with wal.open("rb") as file:
        head = file.read(32)
        size = 24 + int.from_bytes(head[8:12], "big")
        commits = 0
        file.seek(32 + read * size)
        while len(frame := file.read(size)) == size:
            commits += frame[8:16] == head[16:24] and frame[4:8] != bytes(4)
    return commits


def _entry(row: Sequence[Any]) -> Entry:
    return Entry(**dict(zip(_NAMES, row, strict=True)))


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
    """Remote file systems have unreliable file locks and syncs."""
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
        raise StoreError(f"{folder}: is on {kind}, but the database needs a local disk (--state)")
