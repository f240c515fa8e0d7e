"""Whether engines decode ahead: only what nothing races, and as far as rows are cheap.

A draft's token is worth a row where it is reached often enough (``engine.base.Speculation``). The
engine knows how likely each one is; the policy tells it what a row costs, and from how few
sequences on drafting is worth the looking up, by what was accepted lately. Responses that are easy
to predict would win races, so rounds that race decode a token at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollpacker.config.rollout import SpeculationConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import EngineId, RoundKind
from rollpacker.policy.latency import LatencyCurve
from rollpacker.policy.ledger import Attempt, Ledger
from rollpacker.policy.machine import Machine

MOST = 8
"""Tokens of the longest draft. In the demo and with a 135M model 16 brought nothing more."""
_FORGET = 0.5
"""What last step's acceptance counts in this one."""
_PRIOR = (32.0, 0.7)
"""Drafted tokens that are taken to have been seen, and their share that was accepted."""
_CHANGE = 1.5
"""An engine is told anew when the batch from which it drafts has changed by this factor."""


class Speculating:
    """Tells the engines of a round how to decode ahead.

    Args:
        config: the run's.
        latency: seconds of a decode step of the smallest engine by batch size.
        machine: profiles of larger ones, where there are any.
        ledger: the round.
        able: whether engines can.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        latency: Mapping[int, float],
        machine: Machine | None,
        ledger: Ledger,
        *,
        able: bool,
    ) -> None:
        self._on = able and config.mode == "auto"
        self._ledger = ledger
        self._smallest = LatencyCurve(latency)
        self._machine = machine
        self._drafted = self._accepted = 0.0
        self._learnt = False
        self._told: dict[EngineId, do.Speculate] = {}

    def begin(self, engines: Sequence[EngineId], tp: int | None) -> Iterator[do.Decision]:
        """A round begins on these engines, of ``tp`` devices each (None: the smallest size)."""
        self._told.clear()
        self._drafted *= _FORGET
        self._accepted *= _FORGET
        if self._on and self._ledger.kind is not RoundKind.SHORT:
            for engine in engines:
                yield from self._tell(engine, self._curve(tp))

    def formed(self, decision: do.FormEngine) -> Iterator[do.Decision]:
        """An engine gets more devices while a round runs."""
        told = [self._told.pop(member, None) for member in decision.members]
        if any(told) and self._machine is not None:
            size = len(decision.members) * self._machine.engine_devices
            yield from self._tell(decision.engine, self._curve(size))

    def finished(self, event: ev.AttemptFinished, _of: Attempt) -> None:
        """What its drafts brought."""
        self._drafted += event.drafted
        self._accepted += event.accepted
        self._learnt |= event.drafted > 0

    def decide(self) -> Iterator[do.Decision]:
        """Tell those anew for whom it has changed much."""
        if not self._learnt:
            return
        self._learnt = False
        for engine, told in list(self._told.items()):
            below = self._below(told.row_cost)
            if not told.below / _CHANGE <= below <= told.below * _CHANGE:
                yield self._say(engine, told.row_cost)

    def lose(self, event: ev.DevicesLost) -> None:
        """Engines have died."""
        for engine in event.engines:
            self._told.pop(engine, None)

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {"drafted": self._drafted, "accepted": self._accepted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._drafted, self._accepted = state["drafted"], state["accepted"]

    def _curve(self, tp: int | None) -> LatencyCurve:
        if tp is None or self._machine is None or tp == self._machine.engine_devices:
            return self._smallest
        return LatencyCurve(self._machine.profiles[tp].latency)

    def _tell(self, engine: EngineId, curve: LatencyCurve) -> Iterator[do.Decision]:
        yield self._say(engine, curve.row_cost)

    def _say(self, engine: EngineId, row_cost: float) -> do.Speculate:
        decision = do.Speculate(
            engine=engine, below=self._below(row_cost), most=MOST, row_cost=row_cost
        )
        self._told[engine] = decision
        return decision

    def _below(self, row_cost: float) -> int:
        """Most sequences beside which a draft's first token is worth its row."""
        weight, share = _PRIOR
        accepted = (self._accepted + weight * share) / (self._drafted + weight)
        odds = accepted / max(1.0 - accepted, 1e-3)
        return max(1, int(odds / row_cost))
