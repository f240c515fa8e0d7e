"""The decisions of one RL job: passes events to the parts and returns their decisions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.policy.bias import Bias
from rollpacker.policy.engines import Engines
from rollpacker.policy.measure import Measurements
from rollpacker.policy.settings import RolloutSettings
from rollpacker.policy.streaming import Streaming
from rollpacker.policy.tail_batching import TailBatching, every_worker


class RolloutPolicy:
    """Tail batching, streaming and what they know of lengths, as one policy."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._streaming = Streaming(settings.rollout.streaming, settings.rules)
        self._measure = Measurements(
            settings.rollout,
            seed=settings.seed,
            latency=settings.latency,
            cap=settings.cap,
            streaming=settings.rules.stream,
        )
        self._engines: Engines | None = None
        if settings.machine is not None:
            stream = settings.rules.stream
            history = self._measure.history
            self._engines = Engines(settings.machine, settings.rollout, stream, history)
        self._tail = TailBatching(
            settings.rollout,
            settings.sizes,
            asynchronous_grading=settings.asynchronous_grading,
            predict=self._measure.predicted,
            engines=every_worker if self._engines is None else self._engines.lay_out,
        )

    def handle(self, now: float, event: ev.Event) -> list[do.Decision]:
        """Take one event; the decisions are in the order in which to perform them."""
        made: list[do.Decision] = []
        if isinstance(event, ev.StepStarted):
            self._streaming.start(event)
            racing, audits = self._measure.start(event)
            self._follow(made, self._tail.start(event, racing, audits))
        else:
            self._streaming.handle(event)
            self._measure.handle(event, self._tail.audited())
            if self._engines is not None:
                self._engines.handle(event)
            self._follow(made, self._tail.handle(event))
        if self._engines is not None:
            self._move_tail(made, self._engines, now)
        made.extend(self._streaming.decide())
        return made

    def _move_tail(self, made: list[do.Decision], engines: Engines, now: float) -> None:
        for decision in engines.decide(now, self._streaming.waiting):
            made.append(decision)
            self._streaming.observe(decision)
        for worker in engines.retired():
            self._tail.retire(worker)

    def _follow(self, made: list[do.Decision], decisions: Iterable[do.Decision]) -> None:
        for decision in decisions:
            made.append(decision)
            self._streaming.observe(decision)
            self._measure.observe(decision)
            if self._engines is not None:
                self._engines.observe(decision)
            if isinstance(decision, do.BeginRound):
                self._form_engines(made)
            if isinstance(decision, do.FinishRollout):
                self._measure.finish(self._tail.audited())

    def _form_engines(self, made: list[do.Decision]) -> None:
        for group in [] if self._engines is None else self._engines.regroups():
            made.append(group)
            self._streaming.observe(group)

    @property
    def queue(self) -> int:
        """Prompts waiting for a long round."""
        return len(self._tail.queue)

    @property
    def held(self) -> int:
        """Prompts that were drawn and wait: queued, or bucketed for a later round."""
        return self._tail.held

    def bias(self) -> Bias:
        """How far the last rounds' kept responses are from all responses."""
        return self._measure.bias

    def censoring_weights(self, lengths: Sequence[int]) -> list[float]:
        """Inverse-probability-of-censoring weights of kept responses (mode ``prompts``)."""
        return self._measure.weights(lengths)

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        state = {"tail": self._tail.state_dict(), "measure": self._measure.state_dict()}
        return state if self._engines is None else state | {"engines": self._engines.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._tail.load_state_dict(state["tail"])
        self._measure.load_state_dict(state["measure"])
        if self._engines is not None:
            self._engines.load_state_dict(state["engines"])


def from_journal(meta: Mapping[str, Any]) -> RolloutPolicy:
    """The policy that a journal's ``meta`` line describes."""
    policy = RolloutPolicy(RolloutSettings.from_json(meta["settings"]))
    policy.load_state_dict(meta["state"])
    return policy
