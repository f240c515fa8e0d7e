"""The decisions of one RL job: passes events to the parts and returns their decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import EngineId, RoundKind
from rollpacker.policy.engines.speculation import Speculating
from rollpacker.policy.ledger import Attempt, LedgerWriter
from rollpacker.policy.lengths import Bias
from rollpacker.policy.regrouping import Regrouping
from rollpacker.policy.rounds.measure import Measurements
from rollpacker.policy.rounds.rule import own_rule
from rollpacker.policy.rounds.tail_batching import TailBatching
from rollpacker.policy.settings import RolloutSettings
from rollpacker.policy.streaming import Streaming


class RolloutPolicy:
    """Tail batching, streaming and length statistics as one policy. It is the only writer of the
    ledger that the parts read."""

    def __init__(self, settings: RolloutSettings) -> None:
        self.settings = settings
        self._ledger = ledger = LedgerWriter()
        self._streaming = Streaming(settings, ledger)
        rule = own_rule(settings.rollout.tail_batching)
        self._measure = Measurements(settings, ledger, lambda: self._tail.audited(), rule)
        history = self._measure.history
        self._engines: Regrouping | None = None
        if settings.machine is not None:
            self._engines = Regrouping(settings, history, ledger)
        self._speculating = Speculating(settings.rollout, settings.rows, ledger)
        self._running: Sequence[EngineId] = ()
        self._tail = TailBatching(settings, ledger, self._lay_out, rule)
        self._wire()

    def _lay_out(self, kind: RoundKind, engines: tuple[EngineId, ...]) -> Sequence[EngineId]:
        self._running = engines if self._engines is None else self._engines.lay_out(kind, engines)
        return self._running

    def _wire(self) -> None:
        streaming, measure, engines = self._streaming, self._measure, self._engines
        self._hears: dict[type, list[Callable[[Any], None]]] = {
            ev.GradientsAccumulated: [streaming.accumulated, measure.accumulated],
            ev.TailReleased: [streaming.release_tail],
            ev.EngineSlept: [streaming.slept],
            ev.EngineFormed: [streaming.woke],
            ev.UpdateApplied: [streaming.applied],
            ev.DecodeTimed: [self._speculating.timed],
            ev.DevicesLost: [streaming.lose, self._speculating.lose],
            do.AcceptGroup: [streaming.accept],
            do.FinishRollout: [streaming.finish, measure.finish, self._speculating.finish],
        }
        self._feels: dict[type, list[Callable[[Any, Attempt], None]]] = {
            ev.AttemptAborted: [measure.aborted],
            ev.AttemptFinished: [measure.finished, self._speculating.finished],
        }
        if engines is not None:
            self._hears[do.AcceptGroup].append(engines.forget)
            self._hears[ev.DevicesLost].append(engines.lose)
            self._hears[ev.PromptsDrawn] = [engines.drawn]
            self._hears[ev.RoundMeasured] = [engines.measured]
            self._hears[do.DropGroup] = [engines.forget]
            self._hears[do.StartAttempt] = [engines.started]
            self._feels[ev.AttemptFinished].append(engines.finished)
            self._feels[ev.AttemptMigrated] = [engines.migrated]

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        made: list[do.Decision] = []
        if isinstance(event, ev.WeightsPublished):
            return made  # only for the record
        of = self._ledger.take(event)
        if isinstance(event, ev.StepStarted):
            self._streaming.start(event)
            if self._engines is not None:
                self._engines.start(event)
            racing, audits = self._measure.start(event)
            self._follow(made, self._tail.start(event, racing, audits))
        else:
            for react in self._hears.get(type(event), ()):
                react(event)
            if of is not None:
                for touch in self._feels.get(type(event), ()):
                    touch(event, of)
            self._follow(made, self._tail.handle(event, of))
        if self._engines is not None:
            self._add(made, self._engines.decide(now, self._streaming.wanted))
            for engine in self._engines.retired():
                self._tail.retire(engine)
        self._add(made, self._streaming.decide())
        self._add(made, self._speculating.decide())
        return made

    def _add(self, made: list[do.Decision], decisions: Iterable[do.Decision]) -> None:
        for decision in decisions:
            made.append(decision)
            self._ledger.follow(decision)
            if isinstance(decision, do.FormEngine):
                self._add(made, self._speculating.formed(decision))
            elif isinstance(decision, do.SleepEngine):
                self._tail.retire(decision.engine)

    def _follow(self, made: list[do.Decision], decisions: Iterable[do.Decision]) -> None:
        for decision in decisions:
            made.append(decision)
            self._ledger.follow(decision)
            for react in self._hears.get(type(decision), ()):
                react(decision)
            if isinstance(decision, do.BeginRound):
                if self._engines is not None:
                    self._add(made, self._engines.regroups)
                self._add(made, self._speculating.begin(self._running))

    @property
    def speculates(self) -> bool:
        return self._speculating.possible

    @property
    def queue(self) -> int:
        return len(self._tail.queue)

    def bias(self) -> Bias:
        return self._measure.bias

    def journal_head(self) -> dict[str, Any]:
        """A journal's ``meta`` line, from which ``from_journal`` rebuilds this policy."""
        return {"settings": self.settings.to_json(), "state": self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        state = {
            "tail": self._tail.state_dict(),
            "measure": self._measure.state_dict(),
            "speculating": self._speculating.state_dict(),
        }
        return state if self._engines is None else state | {"engines": self._engines.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tail.load_state_dict(state["tail"])
        self._measure.load_state_dict(state["measure"])
        self._speculating.load_state_dict(state["speculating"])
        if self._engines is not None and "engines" in state:  # absent under another layout
            self._engines.load_state_dict(state["engines"])


def from_journal(meta: Mapping[str, Any]) -> RolloutPolicy:
    """The policy that a journal's ``meta`` line describes."""
    policy = RolloutPolicy(RolloutSettings.from_json(meta["settings"]))
    policy.load_state_dict(meta["state"])
    return policy
