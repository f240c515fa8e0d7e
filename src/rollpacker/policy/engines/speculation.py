"""Decides whether engines decode ahead, and from which batch size on.

A drafted token is worth its row if it is reached often enough (``engine.base.Speculation``). The
engine knows each token's probability. The policy gives it the cost of a row, and the batch size
from which drafting pays, by the acceptance of recent drafts. Predictable responses would win races,
so rounds that race decode one token at a time. So does mode ``off``, the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollpacker.config import RolloutConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import EngineId, RoundKind
from rollpacker.policy.engines.hardware import MOST_ROWS, LatencyCurve, RowCosts
from rollpacker.policy.ledger import Attempt, Ledger

MOST = 16  # tokens of the longest draft: experiments/LOG.md
_FORGET = 0.5  # weight of the last step's acceptance in this one
_PRIOR = (22.0, 10.0)  # drafted tokens counted as accepted, and as refused, in advance
_GAIN = 1.15  # least gain of a step with drafts, as looking them up takes time too
_MOST_SEQUENCES = 256  # largest batch from which drafting may begin
_SPREAD = 8  # least ratio of the most to the fewest timed rows for a new row cost
_CHANGE = 1.5  # factor by which the batch for drafting must change before an engine gets a new one


def worth(batch: int, free: int, row_cost: float) -> tuple[int, float]:
    """Tokens of each draft that cost nothing, and the least probability for a further one.

    A row takes ``row_cost`` of a step. With ``batch`` sequences, a step gives one token for each
    ``(1 + row_cost * batch) / batch`` of it. A draft's token must not cost more.
    """
    rows = row_cost * batch
    return free // batch - 1, rows / (1.0 + rows)


def drafted(accepted: float, worth: tuple[int, float], most: int) -> int:
    """Tokens of a draft that are ``worth`` their rows, if each is right with probability
    ``accepted``."""
    spare, least = worth
    count, reached = 0, accepted
    while count < most and reached > 0.0 and (count < spare or reached >= least):
        count, reached = count + 1, reached * accepted
    return count


def tokens(accepted: float, count: int) -> float:
    """Mean tokens per verification: the accepted ones of the draft, and one more."""
    return sum(accepted**n for n in range(count + 1))


def gain(batch: int, accepted: float, rows: RowCosts) -> float:
    """Tokens per time of a step with drafts over those of one without."""
    count = drafted(accepted, worth(batch, rows.free, rows.each), MOST)
    return tokens(accepted, count) * rows.seconds(batch) / rows.seconds(batch * (1 + count))


class Speculating:
    """Sets how a round's engines decode ahead. ``rows`` are their row costs, for larger engines
    too, as a step's devices share all costs. None if engines cannot decode ahead."""

    def __init__(self, config: RolloutConfig, rows: RowCosts | None, ledger: Ledger) -> None:
        plain = config.tail_batching.mode == "off" or config.speculation.mode == "off"
        self._first = self._rows = None if plain else rows
        self._ledger = ledger
        # Drafted tokens. A verification refuses at most one, and skips those behind it.
        self._refused = self._accepted = 0.0
        self._learnt = False
        self._told: dict[EngineId, int] = {}

    @property
    def possible(self) -> bool:
        return self._rows is not None

    def begin(self, engines: Sequence[EngineId]) -> Iterator[do.Speculate]:
        self._refused *= _FORGET
        self._accepted *= _FORGET
        if self._rows is not None and self._ledger.kind is not RoundKind.SHORT:
            for engine in engines:
                yield self._tell(engine, self._rows)

    def formed(self, decision: do.FormEngine) -> Iterator[do.Speculate]:
        told = [self._told.pop(member, None) for member in decision.members]
        if self._rows is not None and any(told):
            yield self._tell(decision.engine, self._rows)

    def finished(self, event: ev.AttemptFinished, _of: Attempt) -> None:
        self._refused += min(event.verifications, event.drafted - event.accepted)
        self._accepted += event.accepted
        self._learnt |= event.verifications > 0

    def timed(self, event: ev.DecodeTimed) -> None:
        """Replace the row costs measured at the start by those of the running engines."""
        seconds = {rows: each for rows, each in event.rows if rows <= MOST_ROWS}
        if self._rows is not None and seconds and max(seconds) >= _SPREAD * min(seconds):
            self._rows = LatencyCurve(seconds).rows()

    def decide(self) -> Iterator[do.Speculate]:
        if not self._learnt or self._rows is None:
            return
        self._learnt = False
        now = self._below(self._rows)
        for engine, told in list(self._told.items()):
            if not told / _CHANGE <= now <= told * _CHANGE:
                yield self._tell(engine, self._rows)

    def finish(self, _decision: do.FinishRollout) -> None:
        self._told.clear()

    def lose(self, event: ev.DevicesLost) -> None:
        for engine in event.engines:
            self._told.pop(engine, None)

    def state_dict(self) -> dict[str, Any]:
        costs = None
        if self._first is not None and self._rows is not None and self._rows != self._first:
            costs = [asdict(self._first), asdict(self._rows)]
        return {"refused": self._refused, "accepted": self._accepted, "rows": costs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._refused = state["refused"]
        self._accepted = state["accepted"]
        if (costs := state["rows"]) is not None:
            first, timed = (RowCosts(**each) for each in costs)
            # Only if the same engines were measured, as row costs of others do not apply.
            if first == self._first:
                self._rows = timed

    def _tell(self, engine: EngineId, rows: RowCosts) -> do.Speculate:
        below = self._told[engine] = self._below(rows)
        return do.Speculate(
            engine=engine, below=below, most=MOST, free=rows.free, row_cost=rows.each
        )

    def _below(self, rows: RowCosts) -> int:
        right, wrong = _PRIOR
        accepted = (self._accepted + right) / (self._accepted + right + self._refused + wrong)
        few, many = 1, _MOST_SEQUENCES  # the gain falls with the batch
        while few < many:
            batch = (few + many + 1) // 2
            few, many = (batch, many) if gain(batch, accepted, rows) >= _GAIN else (few, batch - 1)
        return few
