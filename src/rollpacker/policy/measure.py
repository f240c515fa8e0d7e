"""What a job learns from its own rounds: lengths, bias and, in mode ``auto``, how far to race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollpacker.config import RolloutConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, GroupPart, PromptId, RoundKind
from rollpacker.policy.admission import Admission, Workload
from rollpacker.policy.bias import Audited, Bias, BiasMeter, is_audit_step
from rollpacker.policy.latency import LatencyCurve
from rollpacker.policy.lengths import LengthHistory
from rollpacker.policy.race import Race
from rollpacker.policy.rounds import Racing

UNBIASED = Bias(
    censored=False,
    kept_vs_true_len=1.0,
    truncated_kept=0.0,
    truncated_true=0.0,
    effective_sample_size=1.0,
)


@dataclass(frozen=True, slots=True)
class _End:
    """How an attempt ended."""

    tokens: int
    truncated: bool


class Measurements:
    """Follows a job's events and decisions.

    Args:
        config: the rollout's configuration.
        seed: of the synthetic rounds that mode ``auto`` predicts with.
        latency: seconds of a decode step by batch size.
        cap: longest response, tokens.
        streaming: workers that the tail has freed start gradients.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        seed: int,
        latency: Mapping[int, float],
        cap: int,
        streaming: bool,
    ) -> None:
        self._config = config
        self._seed = seed
        self._latency = LatencyCurve(latency)
        self._streaming = streaming
        tail = config.tail_batching
        buckets = tail.mode == "exact" and tail.bucket_rounds > 1
        self.history = LengthHistory(cap, visits=3 if buckets else 0)
        limit = tail.bias_limit if tail.mode == "auto" else 1.0
        self._meter = BiasMeter(tail.mode, self.history, limit=min(0.95, limit))
        self._admission = Admission(tail)
        self.bias = UNBIASED
        self._train_s = 0.0
        self._train_tokens = 0
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._step = step
        self._kind = RoundKind.FULL
        self._audits = 0
        self._prompt: dict[AttemptId, PromptId] = {}
        self._ends: dict[AttemptId, _End] = {}
        self._kept: dict[PromptId, tuple[AttemptId, ...]] = {}

    def start(self, event: ev.StepStarted) -> tuple[Racing, int]:
        """How far this step's short round over-provisions, and how many prompts it audits."""
        self._begin(event.step)
        tail = self._config.tail_batching
        if is_audit_step(event.step, tail.audit_every):
            self._audits = tail.audit_prompts
        return self._racing(event), self._audits

    def _racing(self, event: ev.StepStarted) -> Racing:
        tail = self._config.tail_batching
        match tail.mode:
            case "race":
                return Racing(eta_prompts=tail.eta_prompts, eta_responses=tail.eta_responses)
            case "prompts":
                return Racing(eta_prompts=tail.eta_prompts)
            case "auto":
                choice = self._admission.choose(
                    event.step,
                    self.history,
                    self._workload(len(event.workers)),
                    np.random.default_rng([self._seed, event.step]),
                    self.bias if self.bias.censored else None,
                )
                return Racing(eta_prompts=choice.eta_prompts, eta_responses=choice.eta_responses)
            case "exact" | "off":
                return Racing()

    def _workload(self, workers: int) -> Workload:
        return Workload(
            prompts=self._config.prompts_per_step,
            responses=self._config.num_generations,
            workers=workers,
            latency=self._latency,
            train_seconds_per_token=self._train_s / max(1, self._train_tokens),
            streaming=self._streaming,
        )

    def observe(self, decision: do.Decision) -> None:
        """Follow what was decided."""
        match decision:
            case do.BeginRound():
                self._kind = decision.round
            case do.StartAttempt():
                self._prompt[decision.attempt] = decision.prompt
            case do.AcceptGroup():
                self._kept[decision.prompt] = decision.attempts
            case _:
                pass

    def handle(self, event: ev.Event, audited: Sequence[Race]) -> None:
        """Take one event; ``audited`` are the prompts that run without aborts."""
        match event:
            case ev.AttemptFinished():
                self._end(event.attempt, event.tokens, event.finish_reason == "length", audited)
            case ev.AttemptAborted():
                if event.attempt not in self._ends and event.attempt in self._prompt:
                    prompt = self._prompt[event.attempt]
                    self.history.observe(prompt, event.tokens, True, self._kind, self._step)
            case ev.GradientsAccumulated():
                self._train_s += event.seconds
                self._train_tokens += sum(map(self._tokens, event.parts))
            case _:
                pass

    def _end(
        self, attempt: AttemptId, tokens: int, truncated: bool, audited: Sequence[Race]
    ) -> None:
        prompt = self._prompt.get(attempt)
        if prompt is None:
            return
        self._ends[attempt] = _End(tokens, truncated)
        is_audit = bool(audited) and any(race.prompt.id == prompt for race in audited)
        source = "audit" if is_audit else self._kind
        self.history.observe(prompt, tokens, False, source, self._step, truncated)

    def _tokens(self, part: GroupPart) -> int:
        attempts = self._kept[part.prompt][part.start : part.stop]
        return sum(self._ends[attempt].tokens for attempt in attempts)

    def finish(self, audited: Sequence[Race]) -> None:
        """The rollout is over: measure its bias."""
        kept = [self._ends[a] for attempts in self._kept.values() for a in attempts]
        if kept:
            self.bias = self._meter.measure(
                self._kind,
                [end.tokens for end in kept],
                [end.truncated for end in kept],
                [self._audit(race.prompt.id) for race in audited],
            )

    def _audit(self, prompt: PromptId) -> Audited:
        ends = [self._ends[a] for a, p in self._prompt.items() if p == prompt and a in self._ends]
        kept = self._kept.get(prompt)
        return Audited(
            lengths=tuple(end.tokens for end in ends),
            truncated=tuple(end.truncated for end in ends),
            kept=None if kept is None else tuple(self._ends[a].tokens for a in kept),
        )

    def predicted(self, prompt: PromptId) -> float | None:
        """Expected length of a prompt's responses; None if it was never visited."""
        return self.history.predicted(prompt)

    def weights(self, lengths: Sequence[int]) -> list[float]:
        """Censoring weights of the kept responses of the step just measured (mode ``prompts``)."""
        return [float(weight) for weight in self._meter.weights(lengths)]

    def state_dict(self) -> dict[str, Any]:
        """What outlives a step, as JSON."""
        return {
            "history": self.history.state_dict(),
            "meter": self._meter.state_dict(),
            "admission": self._admission.state_dict(),
            "train": [self._train_s, self._train_tokens],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self.history.load_state_dict(state["history"])
        self._meter.load_state_dict(state["meter"])
        self._admission.load_state_dict(state["admission"])
        self._train_s, self._train_tokens = state["train"]
