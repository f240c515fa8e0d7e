"""Drives the policy inside verl: workers' reports become events, and decisions go to workers. It
does not know Ray. The actor that holds it gives it a way to send."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter
from rollpacker.core.pump import Pump
from rollpacker.core.types import (
    AttemptId,
    EngineId,
    FinishReason,
    Prompt,
    PromptId,
    ReplicaId,
    RoundKind,
)
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.verl.settings import DOMAIN

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFinished:
    """A response with ``tokens`` generated tokens is complete after ``seconds``."""

    attempt: AttemptId
    tokens: int
    finish_reason: FinishReason
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStopped:
    """A stopped attempt, with the ``seconds`` from its start to the decision to stop. ``tokens`` is
    None if it still decoded, as verl's servers do not report them."""

    attempt: AttemptId
    tokens: int | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """All kept responses of a prompt are in the transfer queue."""

    prompt: PromptId


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A worker cannot continue."""

    error: str


Report = (
    ResponseFinished
    | AttemptStopped
    | Stored
    | Broken
    | ev.AttemptFailed
    | ev.AttemptGraded
    | ev.GradingFailed
)


class InOrder(Generic[T]):
    """Batches in the order of sending, as calls of an actor's coroutines may overtake each
    other."""

    def __init__(self) -> None:
        self._next = 0
        self._early: dict[int, T] = {}

    def take(self, number: int, batch: T) -> Iterator[T]:
        """Take batch ``number``, counted from 0. Yields the batches whose turn it is now."""
        self._early[number] = batch
        while self._next in self._early:
            self._next += 1
            yield self._early.pop(self._next - 1)


# verl places requests and gradients itself, so its servers are one engine to the policy.
_ENGINE, _REPLICA = EngineId(0), ReplicaId(0)
_KINDS = {RoundKind.FULL: 0.0, RoundKind.SHORT: 1.0, RoundKind.LONG: 2.0}
_SPEEDS = 512  # latest responses that give the current speed

_FOR_WORKERS = (
    do.StartAttempt,
    do.AbortAttempt,
    do.GradeAttempt,
    do.AcceptGroup,
    do.FinishRollout,
)

Send = Callable[[int, Sequence[do.Decision]], None]
"""Gives a worker, by number, its decisions without waiting."""


class RoundError(RuntimeError):
    """A round cannot be finished."""


@dataclass(slots=True)
class HostedRound:
    """A round's results, and its open work.

    Args:
        step: verl's global step.
        started: prompts whose responses were begun, in order.
        accepted: prompts to train on.
        deferred: prompts that wait for a later round.
        dropped: prompts that are done without being trained on.
        tokens: generated, of each finished or stopped response.
        kept: tokens of the responses to train on.
        estimated: tokens of stopped responses that nobody counted.
        over: nothing decodes and every prompt is decided.
    """

    step: int
    kind: RoundKind = RoundKind.FULL
    started: dict[PromptId, None] = field(default_factory=dict[PromptId, None])
    accepted: list[PromptId] = field(default_factory=list[PromptId])
    deferred: list[PromptId] = field(default_factory=list[PromptId])
    dropped: list[PromptId] = field(default_factory=list[PromptId])
    tokens: dict[AttemptId, int] = field(default_factory=dict[AttemptId, int])
    kept: int = 0
    estimated: int = 0
    over: bool = False

    @property
    def aborted(self) -> int:
        return sum(self.tokens.values()) - self.kept


class Speed:
    """Estimates a response's tokens by its seconds, from a line through the latest responses. The
    line has an offset, as time before the first and after the last token counts too."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=_SPEEDS)

    def add(self, tokens: int, seconds: float) -> None:
        self._last.append((tokens, seconds))

    def tokens(self, seconds: float) -> int:
        """Tokens generated in ``seconds``, 0 before any response has finished."""
        if not self._last:
            return 0
        tokens, took = np.array(self._last, np.float64).T
        spread = float(np.var(tokens))
        each = float(np.cov(tokens, took, bias=True)[0, 1]) / spread if spread else 0.0
        first = float(np.mean(took)) - each * float(np.mean(tokens))
        if each <= 0.0 or first < 0.0:
            each, first = float(np.sum(took) / np.sum(tokens)), 0.0
        return max(0, round((seconds - first) / each))


class RoundDriver:
    """Performs the policy's decisions through workers, and passes their reports to it. A step is:
    ``start``, ``drawn``, ``place``, reports until ``done``, ``trained``, ``published``. ``folder``
    holds ``journal.jsonl``. ``state`` is the ``state_dict`` of a resumed run."""

    def __init__(
        self,
        settings: RolloutSettings,
        folder: Path,
        state: Mapping[str, Any] | None,
        send: Send,
    ) -> None:
        self._cap = settings.cap
        self._send = send
        self._policy = RolloutPolicy(settings)
        if state is not None:
            self._policy.load_state_dict(state["policy"])
        self._clock = Clock(0.0 if state is None else state["clock_s"])
        folder.mkdir(parents=True, exist_ok=True)
        self._journal = JournalWriter(folder / "journal.jsonl")
        self._journal.meta(self._policy.journal_head())
        self._pump = Pump(self._policy, self._perform, self._clock, self._journal.record)
        self._speed = Speed()
        self._draws: dict[str, int] = {}
        self._parts: list[do.AccumulateGradients] = []
        self._update: do.ApplyUpdate | None = None
        self._prompts: dict[AttemptId, PromptId] = {}
        self._placed: dict[PromptId, int] = {}
        self._outbox: list[do.Decision] = []
        self._unstored: set[PromptId] = set()
        self.round = HostedRound(step=0)

    # The step ---------------------------------------------------------------------------------

    def start(self, step: int, remaining: int) -> int:
        """Begin a round with ``remaining`` fresh rows in the epoch. Returns how many to pass to
        ``drawn``."""
        self._draws, self._update = {}, None
        self._prompts.clear()
        self._placed.clear()
        self.round = HostedRound(step=step)
        self._pump.post(
            ev.StepStarted(
                step=step,
                engines=(_ENGINE,),
                replicas=(_REPLICA,),
                remaining={DOMAIN: remaining},
            )
        )
        return self._draws.get(DOMAIN, 0)

    def drawn(self, prompts: Sequence[Prompt]) -> tuple[PromptId, ...]:
        """Take fresh prompts. Returns all prompts of this round, in order, for ``place``."""
        if self._draws:
            self._pump.post(ev.PromptsDrawn(prompts=tuple(prompts)))
        return tuple(self.round.started)

    def place(self, workers: Mapping[PromptId, int]) -> None:
        """Set the prompts' workers, and let them begin."""
        self._placed.update(workers)
        self._flush()

    @property
    def done(self) -> bool:
        return self.round.over and not self._unstored

    def take(self, reports: Sequence[Report]) -> None:
        """Take reports of workers. Raises ``RoundError`` if one of them cannot continue."""
        for report in reports:
            match report:
                case ResponseFinished():
                    self._finished(report)
                case AttemptStopped():
                    self._stopped(report)
                case Stored():
                    self._unstored.discard(report.prompt)
                case Broken():
                    raise RoundError(report.error)
                case _:
                    self._pump.post(report)
        self._flush()

    def trained(self, seconds: float) -> dict[str, float]:
        """verl has updated its weights in ``seconds``. Returns the round's metrics."""
        assert self.done
        while self._parts:
            given = self._parts.pop(0)
            self._pump.post(
                ev.GradientsAccumulated(
                    replica=given.replica, parts=given.parts, seconds=round(seconds, 6)
                )
            )
            seconds = 0.0
        assert self._update is not None
        self._pump.post(ev.UpdateApplied(step=self.round.step, update=self._update.update))
        self._journal.flush()
        return self.metrics()

    def published(self, step: int) -> None:
        self._pump.post(ev.WeightsPublished(version=step))
        self._journal.flush()

    def end_epoch(self, epoch: int) -> None:
        self._pump.post(ev.EpochEnded(epoch=epoch))

    @property
    def held(self) -> int:
        return self._policy.queue

    @property
    def alarms(self) -> tuple[str, ...]:
        return self._policy.bias().alarms

    def metrics(self) -> dict[str, float]:
        current, bias = self.round, self._policy.bias()
        return {
            "tail/round_kind": _KINDS[current.kind],
            "tail/long_queue": float(self._policy.queue),
            "tail/deferred": float(len(current.deferred)),
            "tail/aborted_tokens": float(current.aborted),
            "tail/aborted_tokens_estimated": float(current.estimated),
            "tail/kept_vs_true_len": bias.kept_vs_true_len,
            **{f"tail/audited_kept_vs_true_{k}": v for k, v in bias.audited.items()},
        }

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, as JSON."""
        return {"policy": self._policy.state_dict(), "clock_s": self._clock()}

    def close(self) -> None:
        self._journal.close()

    # Decisions of the policy ------------------------------------------------------------------

    def _perform(self, decisions: Sequence[do.Decision]) -> None:
        for decision in decisions:
            self._note(decision)
            if isinstance(decision, _FOR_WORKERS):
                self._outbox.append(decision)

    def _note(self, decision: do.Decision) -> None:
        now = self.round
        match decision:
            case do.DrawPrompts():
                self._draws = decision.counts
            case do.BeginRound():
                now.kind = decision.round
            case do.StartAttempt():
                now.started[decision.prompt] = None
                self._prompts[decision.attempt] = decision.prompt
            case do.AcceptGroup():
                now.accepted.append(decision.prompt)
                now.kept += sum(now.tokens[attempt] for attempt in decision.attempts)
                self._unstored.add(decision.prompt)
            case do.DropGroup():
                now.dropped.append(decision.prompt)
            case do.DeferPrompt():
                now.deferred.append(decision.prompt.id)
            case do.FinishRollout():
                now.over = True
            case do.AccumulateGradients():
                self._parts.append(decision)
            case do.ApplyUpdate():
                self._update = decision
            case _:
                # verl publishes weights itself, and reports it by ``published``.
                assert isinstance(decision, (*_FOR_WORKERS, do.PublishWeights)), decision

    def _flush(self) -> None:
        by_worker: dict[int, list[do.Decision]] = defaultdict(list)
        for decision in self._outbox:
            match decision:
                case do.FinishRollout():
                    for worker in set(self._placed.values()):
                        by_worker[worker].append(decision)
                case do.StartAttempt() | do.AcceptGroup():
                    by_worker[self._placed[decision.prompt]].append(decision)
                case do.AbortAttempt() | do.GradeAttempt():
                    prompt = self._prompts[decision.attempt]
                    by_worker[self._placed[prompt]].append(decision)
                case _:
                    raise AssertionError(f"workers do not know {decision}")
        self._outbox.clear()
        for worker, decisions in by_worker.items():
            self._send(worker, decisions)

    # Reports of workers -----------------------------------------------------------------------

    def _finished(self, report: ResponseFinished) -> None:
        self._speed.add(report.tokens, report.seconds)
        self.round.tokens[report.attempt] = report.tokens
        self._pump.post(
            ev.AttemptFinished(
                attempt=report.attempt, tokens=report.tokens, finish_reason=report.finish_reason
            )
        )

    def _stopped(self, report: AttemptStopped) -> None:
        tokens, estimated = report.tokens, report.tokens is None
        if tokens is None:
            tokens = min(self._cap, self._speed.tokens(report.seconds))
            self.round.estimated += tokens
        self.round.tokens[report.attempt] = tokens
        self._pump.post(
            ev.AttemptAborted(attempt=report.attempt, tokens=tokens, estimated=estimated)
        )
