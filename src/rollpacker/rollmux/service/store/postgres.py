"""The store in Postgres: the same tables, one writer by an advisory lock of its session."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from rollpacker.rollmux.service.store.store import Store, StoreError, UnavailableError

_LOCK = 0x526F6C6C4D7578
"""The letters RollMux; one daemon per database."""
_LOCK_S = 2.0
"""The server needs a moment to find that the session of a daemon before has ended."""


class _Connection:
    def __init__(self, conninfo: str) -> None:
        self.db = psycopg.connect(conninfo, autocommit=True, connect_timeout=10)

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            cursor = self.db.execute(_numbered(sql), values)
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            raise UnavailableError(f"Postgres cannot be used: {error}") from error

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        if rows:
            with self.db.cursor() as cursor:
                cursor.executemany(_numbered(sql), rows)

    def close(self) -> None:
        self.db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            with self.db.transaction():
                yield
        except psycopg.Error as error:
            raise UnavailableError(f"Postgres cannot be written: {error}") from error


class PostgresStore(Store):
    """A store in a Postgres database.

    The lock belongs to the session that writes: where the session is lost, so is the lock, and
    nothing more can be written in its name.

    Args:
        conninfo: as libpq takes it: ``postgresql://...`` or ``host=... dbname=...``.

    Raises:
        StoreError: it cannot be reached, or another daemon has it.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        try:
            connection = _Connection(conninfo)
        except psycopg.Error as error:
            raise StoreError(f"--postgres: {error}") from error
        super().__init__(connection)
        try:
            self._prepare(connection)
        except (psycopg.Error, UnavailableError) as error:
            connection.close()
            raise StoreError(f"--postgres: cannot be used: {error}") from error
        except StoreError:
            connection.close()
            raise

    def _prepare(self, connection: _Connection) -> None:
        until = time.monotonic() + _LOCK_S
        while not connection.run("SELECT pg_try_advisory_lock(?)", (_LOCK,))[0][0]:
            if time.monotonic() > until:
                raise StoreError("--postgres: another daemon is running on this database")
            time.sleep(0.05)
        connection.run("SET synchronous_commit = on")
        for name in ("fsync", "full_page_writes"):
            value = connection.run(f"SHOW {name}")[0][0]
            if value != "on":
                raise StoreError(f"--postgres: the server has {name} = {value}; it must be on")
        self.create()

    def reader(self) -> Store:
        """Another connection, which only reads."""
        connection = _Connection(self._conninfo)
        connection.run("SET default_transaction_read_only = on")
        return Store(connection)


def _numbered(sql: str) -> Any:
    """Our statements, with the placeholders of psycopg."""
    return sql.replace("?", "%s")
