"""What was appended is there, whole, in order, whatever happens in between."""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollpacker.rollmux.service.store import (
    Changes,
    Entry,
    Store,
    StoreError,
    UnavailableError,
    backup,
    restore,
)

Opener = Callable[[], Store]


@pytest.fixture
def opener(tmp_path: Path) -> Opener:
    return lambda: Store(tmp_path / "mux.sqlite")


def entry(seq: int, key: str | None = None) -> Entry:
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
    )


def test_everything_comes_back_as_it_was(opener: Opener) -> None:
    store = opener()
    first, second, third = entry(1, "a"), entry(2), entry(3, "c")
    store.append(
        Changes(
            entries=[first, second],
            state={"x": '{"ü":1}', "y": "2"},
            ended=["j0"],
            timeline=["p0", "p1"],
        )
    )
    store.append(
        Changes(
            entries=[third],
            state={"x": "3", "z": "4"},
            gone=["y"],
            ended=["j1"],
            timeline=["p2"],
        )
    )
    store.close()
    store = opener()
    assert list(store.entries()) == [first, second, third]
    assert (store.find("a"), store.find("b")) == (first, None)
    assert store.state() == {"x": "3", "z": "4"}
    assert (store.ended(), store.timeline(2)) == (["j0", "j1"], ["p1", "p2"])
    reader = store.reader()
    assert list(reader.entries(after=2)) == [third]
    reader.close()
    store.close()


@pytest.mark.parametrize("clash", ["seq", "key"])
def test_a_transaction_that_clashes_leaves_nothing(opener: Opener, clash: str) -> None:
    store = opener()
    first, good = entry(1, "a"), entry(2, "b")
    store.append(Changes(entries=[first], state={"x": "1"}))
    bad = entry(1 if clash == "seq" else 3, "a" if clash == "key" else "c")
    with pytest.raises(UnavailableError):
        store.append(Changes([good, bad], {"x": "2"}, ["x"], ["j"], ["p"]))
    assert list(store.entries()) == [first]
    assert (store.state(), store.ended(), store.timeline(9)) == ({"x": "1"}, [], [])
    store.append(Changes(entries=[good]))
    assert list(store.entries()) == [first, good]
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
        reader.append(Changes(entries=[entry(1)]))
    reader.close()
    store.append(Changes(entries=[entry(1)]))
    store.close()


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
        self.state: dict[str, str] = {}

    def tail(self, count: int, keys: list[str]) -> list[Entry]:
        first = len(self.entries) + 1
        return [
            entry(first + number, keys[number] if number < len(keys) else None)
            for number in range(count)
        ]

    @rule(count=st.integers(1, 4), new=st.integers(0, 3), gone=st.integers(0, 2))
    def append(self, count: int, new: int, gone: int) -> None:
        made = self.tail(count, [f"k{len(self.entries)}"])
        changed = {f"p{n}": f"{made[0].seq}" for n in range(new)}
        over = list(self.state.keys() - changed.keys())[:gone]
        self.store.append(Changes(made, changed, over))
        self.entries += made
        self.state = {n: text for n, text in (self.state | changed).items() if n not in over}

    @precondition(lambda self: self.entries)
    @rule()
    def append_a_known_key(self) -> None:
        known = next(each.key for each in self.entries if each.key)
        with pytest.raises(UnavailableError):
            self.store.append(Changes(self.tail(2, ["new", known]), {}, list(self.state)))

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.opener()

    @invariant()
    def holds_what_was_appended(self) -> None:
        assert list(self.store.entries()) == self.entries
        assert self.store.state() == self.state
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
            for table in ("entries", "state", "meta"):
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
    with pytest.raises(StoreError, match="nfs4, but the database needs a local disk"):
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
    for seq in range(1, 400):
        store.append(Changes(entries=[entry(seq, f"key{seq}")]))
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
def test_a_database_that_was_closed_in_good_order_is_not_looked_through(damaged: Path) -> None:
    """Where it is large this takes long."""
    Store(damaged).close()


def with_entries(path: Path, first: int, last: int) -> None:
    """As a daemon that is killed leaves it: its end is in the write-ahead log."""
    code = (
        "import os, sys; sys.path[:0] = sys.argv[1].split(os.pathsep)\n"
        "from pathlib import Path\n"
        "from test_mux_store import Changes, Store, entry\n"
        "store = Store(Path(sys.argv[2]))\n"
        "for seq in range(int(sys.argv[3]), int(sys.argv[4]) + 1):\n"
        "    store.append(Changes(entries=[entry(seq)]))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folders = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", code, folders, str(path), str(first), str(last)], check=False
    )
    assert ran.returncode == -9


def seqs(path: Path) -> tuple[list[int], int]:
    """The entries of a database, and how many are known to be lost."""
    store = Store(path)
    found = [entry.seq for entry in store.entries()], store.lost
    store.close()
    return found


def test_a_backup_of_a_database_in_use_can_be_put_back(opener: Opener, tmp_path: Path) -> None:
    store, path, copy = opener(), tmp_path / "mux.sqlite", tmp_path / "copy"
    store.set_meta({"format": "2"})
    store.append(Changes(entries=[entry(1), entry(2)], state={"x": "1"}))
    assert backup(path, copy) == 2
    assert copy.stat().st_mode & 0o077 == 0
    assert [each.name for each in tmp_path.glob("copy*")] == ["copy"]
    with pytest.raises(FileExistsError):
        backup(path, copy)
    store.append(Changes(entries=[entry(3)], state={"x": "2"}))
    with pytest.raises(StoreError, match="another daemon is running"):
        restore(copy, path)
    store.close()
    assert restore(copy, path) == 2
    store = opener()
    assert ([each.seq for each in store.entries()], store.lost) == ([1, 2], 0)
    assert (store.state(), store.meta()["restored"]) == ({"x": "1"}, "yes")
    store.close()


def test_what_is_no_copy_is_not_put_back(tmp_path: Path) -> None:
    path, copy = tmp_path / "mux.sqlite", tmp_path / "copy"
    Store(path).close()
    for text in (None, "", "a letter " * 500):
        if text is not None:
            copy.write_text(text)
        with pytest.raises(StoreError):
            restore(copy, path)
    assert seqs(path) == ([], 0)
    assert not (tmp_path / "mux.sqlite.new").exists()


def test_an_end_that_was_answered_and_is_lost_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "mux.sqlite"
    with_entries(path, 1, 9)
    wal = tmp_path / "mux.sqlite-wal"
    os.truncate(wal, wal.stat().st_size - 100)
    assert seqs(path) == ([*range(1, 9)], 1)
    assert seqs(path)[1] == 0, "said once"


def test_damage_in_the_middle_of_the_end_is_not_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "mux.sqlite"
    with_entries(path, 1, 2)
    Store(path).close()
    with_entries(path, 3, 12)
    wal = tmp_path / "mux.sqlite-wal"
    with wal.open("r+b") as file:
        file.seek(wal.stat().st_size // 2)
        file.write(b"\xff" * 50)
    for _ in range(2):
        with pytest.raises(StoreError, match="damaged in its middle"):
            Store(path)
    assert 2 < restore(path, path) < 12
    assert seqs(path)[0] == [*range(1, len(seqs(path)[0]) + 1)]
