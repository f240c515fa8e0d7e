"""Engines of several devices: their size in a round, and the engines of its tail.

Joins the planner and the scaling rule to a round's events. A running attempt does not report its
tokens, so it counts at least those of finished attempts on its engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, PromptId, ReplicaId, RoundKind
from rollpacker.policy.engines.hardware import PaperPlanner
from rollpacker.policy.engines.scaling import (
    ActiveAttempt,
    Consolidation,
    Halving,
    ScaleDecision,
    Scaling,
)
from rollpacker.policy.ledger import Attempt, Ledger
from rollpacker.policy.lengths import LengthHistory
from rollpacker.policy.settings import RolloutSettings


class Regrouping:
    """Forms larger engines. ``settings`` must have a machine."""

    def __init__(self, settings: RolloutSettings, history: LengthHistory, ledger: Ledger) -> None:
        assert settings.machine is not None
        self._machine = machine = settings.machine
        self._config = settings.rollout
        self._history = history
        self._ledger = ledger
        self._planner: PaperPlanner | None = None
        if settings.rollout.planner == "paper":
            self._planner = PaperPlanner(machine.sizes)
        frees = settings.rules.stream and settings.rules.layout == "colocated"
        self._scaling = self._build_scaling() if frees else None
        self._tp = machine.engine_devices
        self.regroups: list[do.FormEngine] = []  # of the last laid out round
        self._retired: tuple[EngineId, ...] = ()
        self._prompt_tokens: dict[PromptId, int] = {}
        self._replicas: frozenset[ReplicaId] = frozenset()
        self._begin_round()

    def _begin_round(self) -> None:
        self._base: dict[AttemptId, int] = {}
        self._moved: set[AttemptId] = set()
        self._progress: dict[EngineId, int] = {}

    def _build_scaling(self) -> Scaling | None:
        streaming, profiles = self._config.streaming, self._machine.profiles
        match streaming.scaling:
            case "paper":
                return Halving(lambda tp: profiles[tp].kv_tokens)
            case "fixed":
                first = streaming.scaling_fraction
                return Halving(first=first, last=1.0) if first else None
            case "consolidate":
                return Consolidation(profiles, self._machine.train_token_s)
            case "off":
                return None

    def start(self, event: ev.StepStarted) -> None:
        self._replicas = frozenset(event.replicas)

    def lay_out(self, kind: RoundKind, engines: tuple[EngineId, ...]) -> Sequence[EngineId]:
        self._begin_round()
        self._tp = self._machine.engine_devices
        if self._planner is not None:
            self._tp = self._planner.plan(kind)
        fleet = self._machine.fleet(engines, self._tp)
        while not fleet.engines and self._tp > self._machine.engine_devices:
            # Lost devices have left no complete neighbours for this size.
            self._tp = max(size for size in self._machine.sizes if size < self._tp)
            fleet = self._machine.fleet(engines, self._tp)
        size = self._tp // self._machine.engine_devices
        self.regroups = [
            do.FormEngine(
                engine=lead, members=tuple(EngineId(lead + place) for place in range(size))
            )
            for lead in fleet.engines
            if size > 1
        ]
        if self._scaling is not None:
            known = self._history.distribution() if len(self._history) else None
            self._scaling.begin(fleet.training(self._replicas), known)
        return tuple(fleet.engines)

    def drawn(self, event: ev.PromptsDrawn) -> None:
        self._prompt_tokens |= {prompt.id: prompt.tokens for prompt in event.prompts}

    def started(self, decision: do.StartAttempt) -> None:
        self._base[decision.attempt] = -self._progress.get(decision.engine, 0)

    def forget(self, decision: do.AcceptGroup | do.DropGroup) -> None:
        self._prompt_tokens.pop(decision.prompt, None)

    def finished(self, event: ev.AttemptFinished, of: Attempt) -> None:
        """Count an engine's steps by a finished response, without the tokens of earlier steps."""
        earlier = 0 if of.id in self._moved else event.carried
        steps = event.tokens - earlier - self._base[of.id]
        self._progress[of.bound] = max(self._progress.get(of.bound, 0), steps)

    def migrated(self, event: ev.AttemptMigrated, of: Attempt) -> None:
        self._moved.add(of.id)
        self._base[of.id] = event.tokens - self._progress.get(event.engine, 0)

    def lose(self, event: ev.DevicesLost) -> None:
        self._replicas -= set(event.replicas)
        if self._scaling is not None:
            for engine in event.engines:
                self._scaling.lose(engine)
            self._scaling.lose_replicas(event.replicas)

    def measured(self, event: ev.RoundMeasured) -> None:
        if self._planner is not None and self._ledger.attempts:
            self._planner.observe(self._ledger.kind, self._tp, event.preemptions)

    def decide(self, now: float, gradient_tokens: int) -> Iterable[do.Decision]:
        running = len(self._ledger.running)
        if self._scaling is None or not running:
            return
        finished = 1.0 - running / len(self._ledger.attempts)
        decision = self._scaling.observe(finished, running, self._active, gradient_tokens, now)
        if decision is not None:
            yield from self._follow(decision)

    def _active(self) -> list[ActiveAttempt]:
        return [
            ActiveAttempt(
                attempt=one.id,
                prompt_tokens=self._prompt_tokens.get(one.prompt, 0) + one.added,
                generated=max(one.tokens, self._base[one.id] + self._progress.get(one.bound, 0)),
                engine=one.bound,
            )
            for one in self._ledger.running.values()
        ]

    def retired(self) -> tuple[EngineId, ...]:
        """Engines that no longer exist on their own, since the last call."""
        retired, self._retired = self._retired, ()
        return retired

    def _follow(self, decision: ScaleDecision) -> Iterable[do.Decision]:
        inside = [m for lead, members in decision.groups.items() for m in members if m != lead]
        self._retired = (*self._retired, *decision.freed, *inside)
        size = self._tp // self._machine.engine_devices
        for lead, members in decision.groups.items():
            if len(members) > 1:
                smallest = (EngineId(m + place) for m in members for place in range(size))
                yield do.FormEngine(engine=lead, members=tuple(smallest))
        moves: dict[tuple[EngineId, EngineId], list[AttemptId]] = {}
        for attempt, target in decision.moves.items():
            source = self._ledger.running[attempt].bound
            moves.setdefault((source, target), []).append(attempt)
        for (source, target), attempts in sorted(moves.items()):
            yield do.MigrateAttempts(attempts=tuple(sorted(attempts)), source=source, target=target)

    def state_dict(self) -> dict[str, Any]:
        planner = None if self._planner is None else self._planner.state_dict()
        return {"planner": planner, "prompt_tokens": dict(self._prompt_tokens)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompt_tokens = {PromptId(p): n for p, n in state["prompt_tokens"].items()}
        if self._planner is not None:
            self._planner.load_state_dict(state["planner"])
