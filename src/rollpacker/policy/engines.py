"""Engines that span several workers: their size in a round, and where its tail goes.

Joins the planner and the scaling rule to a round's events. What an attempt has generated is not
reported while it runs; it is at least what finished attempts of its engine needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

from rollpacker.config import RolloutConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, PromptId, RoundKind, WorkerId
from rollpacker.policy.consolidation import Consolidation, ConsolidationSettings
from rollpacker.policy.lengths import LengthHistory
from rollpacker.policy.machine import Machine
from rollpacker.policy.parallelism import (
    ForecastPlanner,
    ForecastSettings,
    LengthForecast,
    PaperPlanner,
    PaperSettings,
    Planner,
    RoundReport,
    occupancy,
)
from rollpacker.policy.scaling import (
    ActiveAttempt,
    FixedScaling,
    FixedScalingSettings,
    PaperScaling,
    PaperScalingSettings,
    ScaleDecision,
    Scaling,
)


class _Running(Sequence[ActiveAttempt]):
    """The running attempts, described only when a rule looks at them and not just counts."""

    def __init__(self, count: int, describe: Callable[[], list[ActiveAttempt]]) -> None:
        self._count = count
        self._describe = describe
        self._items: list[ActiveAttempt] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> ActiveAttempt: ...
    @overload
    def __getitem__(self, place: slice) -> list[ActiveAttempt]: ...
    def __getitem__(self, place: int | slice) -> ActiveAttempt | list[ActiveAttempt]:
        if self._items is None:
            self._items = self._describe()
        return self._items[place]


class Engines:
    """Groups workers into engines.

    Args:
        machine: devices and profiles.
        config: the rollout's configuration.
        stream: whether devices may be freed from the tail at all.
        history: what is known of lengths.
    """

    def __init__(
        self, machine: Machine, config: RolloutConfig, stream: bool, history: LengthHistory
    ) -> None:
        self._machine = machine
        self._config = config
        self._history = history
        self._devices = 0
        self._planner = self._build_planner()
        self._scaling = self._build_scaling() if stream else None
        self._kind = RoundKind.FULL
        self._tp = machine.worker_devices
        self._regroups: list[do.RegroupWorkers] = []
        self._retired: tuple[WorkerId, ...] = ()
        self._prompt_tokens: dict[PromptId, int] = {}
        self._rounds: dict[RoundKind, tuple[int, float]] = {}
        self._begin_round()

    def _begin_round(self) -> None:
        self._at: dict[AttemptId, WorkerId] = {}
        self._base: dict[AttemptId, int] = {}
        self._progress: dict[WorkerId, int] = {}
        self._prompt: dict[AttemptId, PromptId] = {}
        self._started = 0
        self._started_tokens = 0

    def _build_planner(self) -> Planner | None:
        devices, initial = self._machine.devices(), self._machine.worker_devices
        match self._config.planner:
            case "off":
                return None
            case "paper":
                return PaperPlanner(PaperSettings(devices=devices, initial=initial))
            case "forecast":
                return ForecastPlanner(
                    ForecastSettings(devices=devices, initial=initial),
                    self._round_seconds,
                    self._forecast,
                )

    def _build_scaling(self) -> Scaling:
        streaming, machine = self._config.streaming, self._machine
        match streaming.scaling:
            case "paper":
                return PaperScaling(PaperScalingSettings(), machine.kv_tokens)
            case "fixed":
                return FixedScaling(FixedScalingSettings(fraction=streaming.scaling_fraction))
            case "consolidate":
                settings = ConsolidationSettings(
                    sizes=machine.sizes, train_seconds_per_token=machine.train_token_s
                )
                return Consolidation(settings, machine)

    def _round_seconds(self, tp: int, lengths: LengthForecast, kind: RoundKind) -> float:
        del kind
        return self._machine.round_seconds(tp, lengths, self._devices)

    def _forecast(self, kind: RoundKind) -> LengthForecast | None:
        attempts, prompt_tokens = self._rounds.get(kind, (0, 0.0))
        return occupancy(self._history, kind, attempts, prompt_tokens) if attempts else None

    def lay_out(self, kind: RoundKind, workers: tuple[WorkerId, ...]) -> Sequence[WorkerId]:
        """Form the engines of a round; the workers that run one."""
        self._begin_round()
        self._kind = kind
        self._devices = len(workers) * self._machine.worker_devices
        self._tp = self._machine.worker_devices
        if self._planner is not None:
            self._tp = self._planner.plan(kind)
        layout = self._machine.layout(workers, self._tp)
        size = self._tp // self._machine.worker_devices
        self._regroups = [
            do.RegroupWorkers(
                lead=lead, members=tuple(WorkerId(lead + place) for place in range(size))
            )
            for lead in layout.workers
            if size > 1
        ]
        if self._scaling is not None:
            known = self._history.distribution() if len(self._history) else None
            self._scaling.begin(layout, known)
        return tuple(layout.workers)

    def regroups(self) -> list[do.RegroupWorkers]:
        """How the engines of the round that was laid out are formed."""
        return self._regroups

    def observe(self, decision: do.Decision) -> None:
        """Follow what the rollout decided."""
        match decision:
            case do.StartAttempt():
                self._at[decision.attempt] = decision.worker
                self._base[decision.attempt] = -self._progress.get(decision.worker, 0)
                self._prompt[decision.attempt] = decision.prompt
                self._started += 1
                self._started_tokens += self._prompt_tokens.get(decision.prompt, 0)
            case do.AbortAttempt():
                self._at.pop(decision.attempt, None)
            case do.AcceptGroup() | do.DropGroup():
                self._prompt_tokens.pop(decision.prompt, None)
            case _:
                pass

    def handle(self, event: ev.Event) -> None:
        """Take one event."""
        match event:
            case ev.PromptsDrawn():
                self._prompt_tokens |= {prompt.id: prompt.tokens for prompt in event.prompts}
            case ev.AttemptFinished():
                self._finish(event)
            case ev.AttemptMigrated():
                if event.attempt in self._at:
                    self._at[event.attempt] = event.worker
                    start = event.tokens - self._progress.get(event.worker, 0)
                    self._base[event.attempt] = start
            case ev.AttemptFailed() | ev.AttemptAborted():
                self._at.pop(event.attempt, None)
            case ev.RoundMeasured():
                self._report(event)
            case ev.WorkerLost():
                self._at = {a: w for a, w in self._at.items() if w != event.worker}
                if self._scaling is not None:
                    self._scaling.lose(event.worker)
            case _:
                pass

    def _finish(self, event: ev.AttemptFinished) -> None:
        worker = self._at.pop(event.attempt, None)
        if worker is not None:
            steps = event.tokens - self._base[event.attempt]
            self._progress[worker] = max(self._progress.get(worker, 0), steps)

    def _report(self, event: ev.RoundMeasured) -> None:
        if self._planner is not None and self._started:
            self._rounds[self._kind] = self._started, self._started_tokens / self._started
            self._planner.observe(
                RoundReport(
                    kind=self._kind,
                    tp=self._tp,
                    preemptions=event.preemptions,
                    peak_kv=event.peak_kv,
                    seconds=event.seconds,
                )
            )

    def decide(self, now: float, gradient_tokens: int) -> Iterable[do.Decision]:
        """Move the tail when the rule says so."""
        if self._scaling is None or not self._at:
            return
        finished = 1.0 - len(self._at) / self._started
        active = _Running(len(self._at), self._active)
        decision = self._scaling.observe(finished, active, gradient_tokens, now)
        if decision is not None:
            yield from self._follow(decision)

    def _active(self) -> list[ActiveAttempt]:
        return [
            ActiveAttempt(
                attempt=attempt,
                prompt_tokens=self._prompt_tokens.get(self._prompt[attempt], 0),
                generated=max(0, self._base[attempt] + self._progress.get(worker, 0)),
                worker=worker,
            )
            for attempt, worker in self._at.items()
        ]

    def retired(self) -> tuple[WorkerId, ...]:
        """Workers that run no engine any more, since the last call."""
        retired, self._retired = self._retired, ()
        return retired

    def _follow(self, decision: ScaleDecision) -> Iterable[do.Decision]:
        inside = [m for lead, members in decision.groups.items() for m in members if m != lead]
        self._retired = (*self._retired, *decision.freed, *inside)
        for lead, members in decision.groups.items():
            if len(members) > 1:
                yield do.RegroupWorkers(lead=lead, members=members)
        moves: dict[tuple[WorkerId, WorkerId], list[AttemptId]] = {}
        for attempt, target in decision.moves.items():
            if attempt in self._at:
                moves.setdefault((self._at[attempt], target), []).append(attempt)
        for (source, target), attempts in sorted(moves.items()):
            for attempt in attempts:
                self._at[attempt] = target
            yield do.MigrateAttempts(attempts=tuple(sorted(attempts)), source=source, target=target)

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        planner = None if self._planner is None else self._planner.state_dict()
        return {
            "planner": planner,
            "prompt_tokens": dict(self._prompt_tokens),
            "rounds": {str(kind): list(seen) for kind, seen in self._rounds.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._prompt_tokens = {PromptId(p): n for p, n in state["prompt_tokens"].items()}
        self._rounds = {
            RoundKind(kind): (attempts, tokens)
            for kind, (attempts, tokens) in state["rounds"].items()
        }
        if self._planner is not None:
            self._planner.load_state_dict(state["planner"])
