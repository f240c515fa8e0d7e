"""Events in, decisions out, and on record."""

from pathlib import Path

import pytest

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core import journal
from rollpacker.core.decisions import Decision
from rollpacker.core.events import Event
from rollpacker.core.pump import Pump
from rollpacker.core.types import AttemptId


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
