"""The store in one SQLite file: WAL, a full sync at every commit, one writer by file lock."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollpacker.rollmux.service.store.store import Store, StoreError, UnavailableError

_REMOTE = ("nfs", "cifs", "smb", "9p", "fuse.sshfs", "ceph", "glusterfs", "lustre", "afs", "ncp")


class _Connection:
    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        mode = "ro" if read_only else "rwc"
        self.db = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=5.0,
        )

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            return self.db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise UnavailableError(f"the database cannot be used: {error}") from error

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        self.db.executemany(sql, rows)

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield
            self.db.execute("COMMIT")
        except (sqlite3.Error, UnavailableError) as error:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise UnavailableError(f"the database cannot be written: {error}") from error


class SqliteStore(Store):
    """A store on local disk.

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
            self._connection = _Connection(path)
            self._prepare(check)
            super().__init__(self._connection)
            self.create()
        except (sqlite3.Error, UnavailableError) as error:
            os.close(self._lock)
            raise StoreError(f"{path}: cannot be used as a database: {error}") from error
        except StoreError:
            os.close(self._lock)
            raise

    def _prepare(self, check: bool) -> None:
        db = self._connection.db
        found = "ok"
        if check or not self._closed():
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise StoreError(
                f"{self._path}: the database is damaged ({found}); put back a copy or move it away"
            )
        mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise StoreError(f"{self._path}: no write-ahead log here (journal mode {mode})")
        db.execute("PRAGMA synchronous=FULL")

    def _closed(self) -> bool:
        """Whether the last daemon said so: reading it all takes long where it is large."""
        db = self._connection.db
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return False
        return db.execute("SELECT value FROM meta WHERE name = 'closed'").fetchone() == ("yes",)

    def reader(self) -> Store:
        """Another connection, which only reads."""
        return Store(_Connection(self._path, read_only=True))

    def close(self) -> None:
        """Let go of the connection and of the lock."""
        super().close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


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
