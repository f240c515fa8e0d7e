"""What was appended is there, whole, in order, whatever happens in between."""

import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollpacker.rollmux.service.store import (
    Entry,
    Grant,
    Store,
    StoredSnapshot,
    StoreError,
    UnavailableError,
    chained,
)

Opener = Callable[[], Store]


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    return lambda: Store(tmp_path / "mux.sqlite")


def entry(seq: int, previous: str, key: str | None = None) -> Entry:
    return Entry(
        seq=seq,
        t=seq + 0.1234567890123,
        wall_s=1.5,
        key=key,
        request="r",
        event='{"kind":"x"}',
        decisions="[]",
        status=201,
        answer=None if seq % 2 else '{"ü": 1}',
    ).sealed(previous)


def test_entries_come_back_as_they_were(opener: Opener) -> None:
    store = opener()
    first = entry(1, "", "a")
    second = entry(2, first.digest)
    store.append([first, second], [Grant(7, "j", "train", 1)], {})
    store.append([third := entry(3, second.digest, "c")], [Grant(8, "j", "rollout", 3)], {7: 3})
    store.close()
    store = opener()
    assert list(chained(store.entries())) == [first, second, third]
    assert store.find("a") == first
    assert store.find("b") is None
    assert store.live() == {8: "j"}
    reader = store.reader()
    assert list(reader.entries(after=2)) == [third]
    reader.close()
    store.close()


@pytest.mark.parametrize("clash", ["seq", "key", "token"])
def test_a_transaction_that_clashes_leaves_nothing(opener: Opener, clash: str) -> None:
    store = opener()
    first = entry(1, "", "a")
    store.append([first], [Grant(1, "j", "rollout", 1)], {})
    good = entry(2, first.digest, "b")
    bad = entry(1 if clash == "seq" else 3, good.digest, "a" if clash == "key" else "c")
    grants = [Grant(1 if clash == "token" else 2, "j", "train", 2)]
    with pytest.raises(UnavailableError):
        store.append([good, bad], grants, {1: 2})
    assert list(store.entries()) == [first]
    assert store.live() == {1: "j"}
    store.append([good], [], {})
    assert list(store.entries()) == [first, good]
    store.close()


def snapshot(seq: int) -> StoredSnapshot:
    return StoredSnapshot(seq, f"digest {seq}", "version", "ended", f'{{"ü": {seq}}}', "checksum")


def test_snapshots_and_the_jobs_that_ended_before_them(opener: Opener) -> None:
    store = opener()
    store.append([first := entry(1, ""), entry(2, first.digest)], [], {})
    assert (store.digest(1), store.digest(3)) == (first.digest, None)
    for seq in (2, 5, 9):
        store.add_snapshot(snapshot(seq), f"of {seq}", {2: 0, 5: 2, 9: 5}[seq], keep=2)
    store.close()
    store = opener()
    assert store.snapshots() == [snapshot(9), snapshot(5)]
    assert store.ended_jobs(5) == ["of 2", "of 5"]
    store.add_snapshot(snapshot(7), "of 7", 5, keep=2)
    assert store.snapshots() == [snapshot(7), snapshot(5)]
    assert store.ended_jobs(9) == ["of 2", "of 5", "of 7"]
    with pytest.raises(UnavailableError):
        store.add_snapshot(snapshot(5), "of 5", 6, keep=2)
    assert store.snapshots() == [snapshot(7), snapshot(5)]
    assert store.ended_jobs(9) == ["of 2", "of 5", "of 7"]
    store.add_snapshot(snapshot(8), "of 8", 0, keep=2)
    assert (store.snapshots(), store.ended_jobs(9)) == ([snapshot(8)], ["of 8"])
    store.close()


def test_one_writer(opener: Opener) -> None:
    store = opener()
    with pytest.raises(StoreError, match="another daemon is running"):
        opener()
    store.close()
    opener().close()


def test_a_reader_cannot_write(opener: Opener) -> None:
    store = opener()
    reader = store.reader()
    with pytest.raises(UnavailableError):
        reader.append([entry(1, "")], [], {})
    reader.close()
    store.append([entry(1, "")], [], {})
    store.close()


def test_altered_entries_break_the_chain() -> None:
    entries = [first := entry(1, ""), second := entry(2, first.digest), entry(3, second.digest)]
    assert list(chained(iter(entries))) == entries
    for change in ({"event": "{}"}, {"t": 9.0}, {"answer": None}, {"status": 200}, {"key": "k"}):
        altered = [first, replace(second, **change), entries[2]]
        with pytest.raises(StoreError, match="entry 2 was altered"):
            list(chained(iter(altered)))
    with pytest.raises(StoreError, match="entry 2 is missing"):
        list(chained(iter([first, entries[2]])))


def test_the_database_is_as_durable_as_it_should_be(tmp_path: Path) -> None:
    store = Store(tmp_path / "mux.sqlite")
    db = store._db
    assert db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    store.close()


class StoreMachine(RuleBasedStateMachine):
    """Appends, failing appends and restarts against a list."""

    opener: Opener

    def __init__(self) -> None:
        super().__init__()
        self.store = self.opener()
        self.entries: list[Entry] = []
        self.live: dict[int, str] = {}
        self.token = 0

    def tail(self, count: int, keys: list[str]) -> list[Entry]:
        made: list[Entry] = []
        last = self.entries[-1].digest if self.entries else ""
        for number in range(count):
            key = keys[number] if number < len(keys) else None
            made.append(entry(len(self.entries) + number + 1, last, key))
            last = made[-1].digest
        return made

    @rule(count=st.integers(1, 4), grants=st.integers(0, 3), ends=st.integers(0, 2))
    def append(self, count: int, grants: int, ends: int) -> None:
        made = self.tail(count, [f"k{len(self.entries)}"])
        seq = made[0].seq
        given = [Grant(self.token + n, f"j{n}", "train", seq) for n in range(grants)]
        over = dict.fromkeys(list(self.live)[:ends], seq)
        self.store.append(made, given, over)
        self.entries += made
        self.token += grants
        self.live |= {each.token: each.job for each in given}
        self.live = {token: job for token, job in self.live.items() if token not in over}

    @precondition(lambda self: self.entries)
    @rule()
    def append_a_known_key(self) -> None:
        known = next(each.key for each in self.entries if each.key)
        with pytest.raises(UnavailableError):
            self.store.append(self.tail(2, ["new", known]), [], dict.fromkeys(self.live, 1))

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opener()

    @invariant()
    def holds_what_was_appended(self) -> None:
        assert list(chained(self.store.entries())) == self.entries
        assert self.store.live() == self.live
        assert self.store.find("new") is None
        for each in self.entries:
            assert each.key is None or self.store.find(each.key) == each

    def teardown(self) -> None:
        self.store.close()


def test_any_order_of_appends_and_restarts(opener: Opener) -> None:
    """Every example gets a store of its own."""

    class Machine(StoreMachine):
        pass

    def fresh(self: StoreMachine) -> Store:
        return opener()

    Machine.opener = fresh  # type: ignore[assignment]

    class Emptied(Machine):
        def __init__(self) -> None:
            store = opener()
            for table in ("entries", "permits", "meta"):
                store._db.execute(f"DELETE FROM {table}")
            store.close()
            super().__init__()

    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Emptied,
        settings=settings(
            max_examples=settings().max_examples // 8,
            stateful_step_count=12,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_remote_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"none / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    real = Path.read_text

    def text(self: Path, *args: Any, **more: Any) -> str:
        return mounts if str(self) == "/proc/self/mounts" else real(self, *args, **more)

    monkeypatch.setattr(Path, "read_text", text)
    with pytest.raises(StoreError, match="nfs4; the database needs a local disk"):
        Store(tmp_path / "mux.sqlite")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mux.sqlite"
    path.write_text("this is not a database, it is a letter " * 100)
    with pytest.raises(StoreError, match="cannot be used as a database"):
        Store(path)


@pytest.fixture
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A database with a page of old entries gone; closed in good order or not."""
    path = tmp_path / "mux.sqlite"
    store = Store(path)
    last = ""
    for seq in range(1, 400):
        made = entry(seq, last, f"key{seq}")
        last = made.digest
        store.append([made], [], {})
    store.set_closed(request.param)
    store.close()
    pages = path.stat().st_size // 4096
    data = bytearray(path.read_bytes())
    data[4096 * (pages // 2) : 4096 * (pages // 2) + 2000] = b"\xff" * 2000
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("damaged", [False], indirect=True)
def test_a_damaged_database_is_refused(damaged: Path) -> None:
    with pytest.raises((StoreError, sqlite3.Error), match=r"damaged|malformed"):
        Store(damaged)


@pytest.mark.parametrize("damaged", [True], indirect=True)
def test_a_database_that_was_closed_in_good_order_is_checked_when_asked(damaged: Path) -> None:
    """Where it is large this takes long."""
    Store(damaged).close()
    with pytest.raises((StoreError, sqlite3.Error), match=r"damaged|malformed"):
        Store(damaged, check=True)
