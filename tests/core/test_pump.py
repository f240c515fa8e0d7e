"""Events in, decisions out; very many decisions in parts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core import journal
from rollpacker.core.decisions import Decision
from rollpacker.core.events import Event
from rollpacker.core.pump import Pump
from rollpacker.core.types import AttemptId

MANY = 5000


class Aborting:
    """Aborts as many attempts as the number of an epoch says."""

    def handle(self, _now: float, event: Event) -> list[Decision]:
        assert isinstance(event, ev.EpochEnded)
        return [do.AbortAttempt(attempt=AttemptId(n)) for n in range(event.epoch)]


class Loop:
    """What was put off, until it is called."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def turn(self) -> None:
        now = list(self.waiting)
        self.waiting.clear()
        for call in now:
            call()


def pump_of(performed: list[int], flushed: list[int], loop: Loop | None) -> Pump:
    return Pump(
        Aborting(),
        lambda made: performed.extend(each.attempt for each in made),  # pyright: ignore
        lambda: 0.0,
        flush=lambda: flushed.append(len(performed)),
        later=None if loop is None else loop.waiting.append,
    )


def test_without_others_all_is_performed_at_once() -> None:
    performed, flushed = [], []
    pump_of(performed, flushed, None).post(ev.EpochEnded(epoch=MANY))
    assert performed == [*range(MANY)]
    assert flushed == [MANY]


def test_very_many_decisions_leave_others_their_turn() -> None:
    performed, flushed, loop = [], [], Loop()
    pump = pump_of(performed, flushed, loop)
    pump.post(ev.EpochEnded(epoch=MANY))
    first = len(performed)
    assert 0 < first < MANY
    assert loop.waiting
    pump.post(ev.EpochEnded(epoch=2))
    assert len(performed) == first, "what comes next has to wait"
    turns = 0
    while loop.waiting:
        assert not flushed
        loop.turn()
        turns += 1
    assert turns > 2
    assert performed == [*range(MANY), 0, 1]
    assert flushed == [MANY + 2]


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_is_left_can_be_hurried_or_forgotten(forgotten: bool) -> None:
    performed, flushed, loop = [], [], Loop()
    pump = pump_of(performed, flushed, loop)
    pump.post(ev.EpochEnded(epoch=MANY))
    first = len(performed)
    pump.clear() if forgotten else pump.hurry()
    assert performed == [*range(first if forgotten else MANY)]
    loop.turn()
    assert not loop.waiting
    pump.post(ev.EpochEnded(epoch=1))
    assert performed[-1] == 0
    assert len(performed) == 1 + (first if forgotten else MANY)


class Late:
    """Aborts an attempt from the first second on."""

    def handle(self, now: float, _event: Event) -> list[Decision]:
        return [do.AbortAttempt(attempt=AttemptId(0))] if now >= 1.0 else []


@pytest.mark.parametrize("now", [0.9999995001, 0.99999949, 1.0000004, 0.1 + 0.2, 1e6 / 3])
def test_a_policy_is_told_the_time_that_is_written(tmp_path: Path, now: float) -> None:
    """A clock has more digits than a line: what is decided live is decided again."""
    path = tmp_path / "journal.jsonl"
    writer = journal.JournalWriter(path)
    writer.meta({"settings": {}, "state": {}})
    Pump(Late(), lambda _made: None, lambda: now, writer.record).post(ev.EpochEnded(epoch=0))
    writer.close()
    replayed = journal.replay(path, lambda _meta: Late())
    assert replayed.events == 1
    assert replayed.differences == []
