"""A bounded journal: segments that replay alone, gaps of a full disk, journals without either."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollpacker.core.events import EpochEnded
from rollpacker.core.journal import JournalWriter, read, replay, segments

SETTINGS = {"settings": {}, "state": {}}


class Silent:
    """A policy that decides nothing."""

    def handle(self, now, event):
        return []


def build(meta):
    assert set(meta) == {"settings", "state"}
    return Silent()


def write(path: Path, steps: int, most: float, lines: int = 20) -> JournalWriter:
    writer = JournalWriter(path)
    writer.meta(SETTINGS)
    for step in range(steps):
        for _ in range(lines):
            writer.record(float(step), EpochEnded(epoch=step), [])
        writer.flush()
        writer.turn(lambda: SETTINGS, most)
    writer.close()
    return writer


def test_it_stays_bounded_over_ten_thousand_steps(tmp_path: Path) -> None:
    path, most = tmp_path / "journal.jsonl", 100_000
    write(path, 10_000, most)
    parts = segments(path)
    assert parts[-1] == path
    assert 7 <= len(parts) <= 9
    assert sum(part.stat().st_size for part in tmp_path.iterdir()) <= most * 1.05
    epochs = [line["event"]["epoch"] for p in parts for _, line in read(p) if "event" in line]
    assert epochs == sorted(epochs)
    assert epochs[-1] == 9_999
    assert set(epochs) == set(range(epochs[0], 10_000))
    for part in parts:
        assert "meta" in next(iter(read(part)))[1]
        assert replay(part, build).differences == []
    whole = replay(path, build)
    assert whole.events == len(epochs)


def test_it_goes_on_in_its_segments_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, 60, 300_000)
    before = segments(path)
    write(path, 60, 300_000)
    assert segments(path)[: len(before) - 1] == before[:-1]
    assert len(segments(path)) > len(before)
    assert replay(path, build).events == 2 * 60 * 20


def test_without_a_limit_it_is_one_file(tmp_path: Path) -> None:
    write(tmp_path / "journal.jsonl", 50, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["journal.jsonl"]
    assert replay(tmp_path / "journal.jsonl", build).events == 1000


def test_a_full_disk_leaves_a_gap_between_whole_lines(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    path = tmp_path / "journal.jsonl"
    errors: list[OSError] = []
    writer = JournalWriter(path, errors.append)
    writer.meta(SETTINGS)
    writer.record(1.0, EpochEnded(epoch=1), [])
    writer.flush()
    file, writer._file = writer._file, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    writer._file.truncate = file.truncate  # type: ignore[method-assign]
    writer.record(2.0, EpochEnded(epoch=2), [])
    writer.flush()
    writer.record(3.0, EpochEnded(epoch=3), [])
    writer.flush()
    writer._file = file
    writer.turn(lambda: SETTINGS, 0)
    writer.record(4.0, EpochEnded(epoch=4), [])
    writer.close()
    assert len(errors) == 1
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"]["epoch"] for line in lines if "event" in line] == [1, 4]
    assert replay(path, build).events == 2


def test_a_turn_loses_no_line_that_waits(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    writer = JournalWriter(path)
    writer.meta(SETTINGS)
    for epoch in range(20):
        writer.record(float(epoch), EpochEnded(epoch=epoch), [])
    writer.turn(lambda: SETTINGS, 2000)
    writer.close()
    assert len(segments(path)) == 2
    assert replay(path, build).events == 20


def full(path: Path, writer: JournalWriter) -> None:
    """It takes no byte, and cannot be cut either."""
    writer._file.close()
    writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115


def stays(path: Path, writer: JournalWriter) -> None:
    """The oldest segment cannot be removed."""
    (path.parent / "journal-00001.jsonl").mkdir()


def gone(path: Path, writer: JournalWriter) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [full, stays, gone])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_who_goes_on_without_it_is_told_and_never_ended(
    tmp_path: Path, harm: Callable[[Path, JournalWriter], None]
) -> None:
    """Whatever of the journal's upkeep fails; without ``on_error`` it is raised."""
    for errors in ([], None):
        path = tmp_path / f"{errors is None}" / "journal.jsonl"
        path.parent.mkdir()
        writer = JournalWriter(path, None if errors is None else errors.append)
        writer.meta(SETTINGS)
        harm(path, writer)
        writer.record(1.0, EpochEnded(epoch=1), [])
        if errors is None:
            with pytest.raises(OSError, match=r"space|directory"):
                writer.turn(lambda: SETTINGS, 1)
            continue
        for step in range(3):
            writer.turn(lambda: SETTINGS, 1)
            writer.record(2.0 + step, EpochEnded(epoch=2), [])
        writer.close()
        assert errors
        if harm is stays:
            (path.parent / "journal-00001.jsonl").rmdir()
            assert replay(path, build).events == 4
