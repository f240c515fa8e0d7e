"""What SQLite and Postgres have in common: three tables and the statements on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from operator import attrgetter
from typing import Any, Protocol

from rollpacker.rollmux.service.store import Entry, Grant

TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS entries (seq BIGINT PRIMARY KEY, t DOUBLE PRECISION NOT NULL,"
    " wall_s DOUBLE PRECISION NOT NULL, key TEXT UNIQUE, request TEXT NOT NULL,"
    " event TEXT NOT NULL, decisions TEXT NOT NULL, status INTEGER NOT NULL, answer TEXT,"
    " digest TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS permits (token BIGINT PRIMARY KEY, job TEXT NOT NULL,"
    " phase TEXT NOT NULL, seq BIGINT NOT NULL, ended BIGINT)",
    "CREATE INDEX IF NOT EXISTS live_permits ON permits (token) WHERE ended IS NULL",
)
_NAMES = tuple(each.name for each in fields(Entry))
_COLUMNS = ", ".join(_NAMES)
_ROW = attrgetter(*_NAMES)
_PAGE = 2000


class Connection(Protocol):
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


class SqlStore:
    """The statements of a store over a connection; by itself it can only read."""

    def __init__(self, connection: Connection) -> None:
        self._db = connection

    def reader(self) -> SqlStore:
        """Itself: it is one."""
        return self

    def close(self) -> None:
        """Let go of the connection."""
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
        """Write some of it."""
        sql = (
            "INSERT INTO meta (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = excluded.value"
        )
        with self._db.transaction():
            self._db.run_many(sql, list(values.items()))

    def append(
        self, entries: Sequence[Entry], grants: Sequence[Grant], ends: Mapping[int, int]
    ) -> None:
        """Entries, permits issued and permits ended, in one transaction."""
        marks = ", ".join("?" * len(_NAMES))
        with self._db.transaction():
            rows = [_ROW(entry) for entry in entries]
            self._db.run_many(f"INSERT INTO entries ({_COLUMNS}) VALUES ({marks})", rows)
            self._db.run_many(
                "INSERT INTO permits (token, job, phase, seq) VALUES (?, ?, ?, ?)",
                [(each.token, each.job, each.phase, each.seq) for each in grants],
            )
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

    def live(self) -> dict[int, str]:
        """Token and job of every permit that has not ended."""
        return dict(self._db.run("SELECT token, job FROM permits WHERE ended IS NULL"))


def _entry(row: Sequence[Any]) -> Entry:
    return Entry(**dict(zip(_NAMES, row, strict=True)))
