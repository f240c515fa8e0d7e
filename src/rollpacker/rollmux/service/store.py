"""The store: an append-only log of what happened, with the answers that were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

FORMAT = "1"


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


@dataclass(frozen=True, slots=True)
class Grant:
    """A permit as the store knows it: its fencing token, and the entry that issued it."""

    token: int
    job: str
    phase: str
    seq: int


class Store(Protocol):
    """Durable: what ``append`` returned from survives a crash of the machine. One writer."""

    def meta(self) -> dict[str, str]:
        """Format, settings, clock."""
        ...

    def set_meta(self, values: Mapping[str, str]) -> None:
        """Write some of it, in a transaction of its own."""
        ...

    def append(
        self, entries: Sequence[Entry], grants: Sequence[Grant], ends: Mapping[int, int]
    ) -> None:
        """One transaction: entries, permits issued, and ``token -> seq`` of permits that ended.

        Raises ``UnavailableError`` where it is not certain that all of it is on disk.
        """
        ...

    def find(self, key: str) -> Entry | None:
        """The entry of an idempotency key."""
        ...

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries after a sequence number, in order."""
        ...

    def live(self) -> dict[int, str]:
        """Token and job of every permit that has not ended."""
        ...

    def reader(self) -> Store:
        """Another connection, which only reads."""
        ...

    def close(self) -> None:
        """Let go of the connection and of the lock."""
        ...


def chained(entries: Iterator[Entry], previous: str = "", seq: int = 0) -> Iterator[Entry]:
    """The same entries, each checked against the chain. Raises ``StoreError`` on a break."""
    for entry in entries:
        if entry.seq != seq + 1:
            raise StoreError(f"entry {seq + 1} is missing, the next one is {entry.seq}")
        if entry.sealed(previous).digest != entry.digest:
            raise StoreError(f"entry {entry.seq} was altered: its digest does not fit")
        previous, seq = entry.digest, entry.seq
        yield entry
