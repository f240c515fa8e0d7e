"""What a job learns from its own rounds: lengths, bias and, in mode ``auto``, how far to race."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import GroupPart, PromptId
from rollpacker.policy.engines.latency import LatencyCurve
from rollpacker.policy.ledger import Attempt, Ledger
from rollpacker.policy.lengths.bias import Audited, Bias, BiasMeter, Response, is_audit_step
from rollpacker.policy.lengths.lengths import LengthHistory
from rollpacker.policy.rounds.auto_mode import AutoMode, RoundCosts
from rollpacker.policy.rounds.race import Racing
from rollpacker.policy.settings import RolloutSettings


class Measurements:
    """Follows a job's events and decisions.

    Args:
        settings: the run's; its seed is that of the rounds that mode ``auto`` predicts with.
        ledger: the round's attempts.
        audited: prompts of this round that run without aborts.
    """

    def __init__(
        self,
        settings: RolloutSettings,
        ledger: Ledger,
        audited: Callable[[], Collection[PromptId]],
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._latency = LatencyCurve(settings.latency)
        self._audited = audited
        tail = settings.rollout.tail_batching
        self._carries = tail.carries
        self.history = LengthHistory(settings.cap)
        limit = tail.bias_limit if tail.mode == "auto" else 1.0
        self._meter = BiasMeter(tail.mode, self.history, limit=min(0.95, limit))
        self._auto = AutoMode(tail)
        self.bias = Bias()
        self._train_s = 0.0
        self._train_tokens = 0

    def start(self, event: ev.StepStarted) -> tuple[Racing, int]:
        """How far this step's short round over-provisions, and how many prompts it audits."""
        tail = self._settings.rollout.tail_batching
        audits = tail.audit_prompts if is_audit_step(event.step, tail.audit_every) else 0
        return self._racing(event), 0 if self._carries else audits

    def _racing(self, event: ev.StepStarted) -> Racing:
        tail = self._settings.rollout.tail_batching
        match tail.mode:
            case "race":
                return Racing(eta_prompts=tail.eta_prompts, eta_responses=tail.eta_responses)
            case "prompts" | "partial":
                return Racing(eta_prompts=tail.eta_prompts)
            case "auto":
                choice = self._auto.choose(
                    event.step,
                    self.history,
                    self._workload(len(event.engines)),
                    np.random.default_rng([self._settings.seed, event.step]),
                    self.bias if self.bias.censored else None,
                )
                return Racing(eta_prompts=choice.eta_prompts, eta_responses=choice.eta_responses)
            case "exact" | "off":
                return Racing()

    def _workload(self, engines: int) -> RoundCosts:
        return RoundCosts(
            prompts=self._settings.rollout.prompts_per_step,
            responses=self._settings.rollout.num_generations,
            engines=engines,
            latency=self._latency,
            train_seconds_per_token=self._train_s / max(1, self._train_tokens),
            streaming=self._settings.rules.stream,
        )

    def finished(self, event: ev.AttemptFinished, of: Attempt) -> None:
        """A response is there; one that was there in an earlier round is known."""
        if event.carried and event.carried == event.tokens:
            return
        ledger = self._ledger
        source = "audit" if of.prompt in self._audited() else ledger.kind
        truncated = event.finish_reason == "length"
        self.history.observe(of.prompt, event.tokens, False, source, ledger.step, truncated)

    def aborted(self, event: ev.AttemptAborted, of: Attempt) -> None:
        """An attempt has stopped; it may have finished before, or go on in the next round."""
        ledger = self._ledger
        if of.finish_reason is None and not self._carries:
            self.history.observe(of.prompt, event.tokens, True, ledger.kind, ledger.step)

    def accumulated(self, event: ev.GradientsAccumulated) -> None:
        """Gradients have taken so long."""
        self._train_s += event.seconds
        self._train_tokens += sum(map(self._tokens, event.parts))

    def _tokens(self, part: GroupPart) -> int:
        kept = self._ledger.kept[part.prompt]
        return sum(attempt.tokens for attempt in kept[part.start : part.stop])

    def finish(self, decision: do.FinishRollout) -> None:
        """The rollout is over: measure its bias."""
        del decision
        kept = [attempt for group in self._ledger.kept.values() for attempt in group]
        if kept:
            self.bias = self._meter.measure(
                [attempt.tokens for attempt in kept],
                [self._audit(prompt) for prompt in self._audited()],
            )

    def _audit(self, prompt: PromptId) -> Audited:
        ends = [one for one in self._ledger.groups[prompt] if one.finish_reason is not None]
        kept = self._ledger.kept.get(prompt)
        return Audited(
            ended=tuple(map(_response, ends)),
            kept=None if kept is None else tuple(map(_response, kept)),
        )

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {
            "history": self.history.state_dict(),
            "meter": self._meter.state_dict(),
            "admission": self._auto.state_dict(),
            "train": [self._train_s, self._train_tokens],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.history.load_state_dict(state["history"])
        self._meter.load_state_dict(state["meter"])
        self._auto.load_state_dict(state["admission"])
        self._train_s, self._train_tokens = state["train"]


def _response(attempt: Attempt) -> Response:
    return Response(float(attempt.tokens), float(attempt.turns), attempt.wait_s)
