"""A job's statistics of its rounds: lengths, bias and, in mode ``auto``, how far to race."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollpacker.config import TailBatchingConfig
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.groups import over_provision
from rollpacker.core.types import GroupPart, PromptId
from rollpacker.policy.engines.hardware import LatencyCurve, consolidation_threshold
from rollpacker.policy.ledger import Attempt, Ledger
from rollpacker.policy.lengths import (
    ENOUGH_GROUPS,
    Audited,
    Bias,
    BiasMeter,
    KaplanMeier,
    LengthHistory,
    Response,
    is_audit_step,
)
from rollpacker.policy.rounds.race import Racing
from rollpacker.policy.rounds.rule import OwnRule
from rollpacker.policy.settings import RolloutSettings

Lengths = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCosts:
    """Costs of a step: ``prompts`` of ``responses`` each, decoded by ``engines``. ``latency`` is
    that of one engine. ``train_seconds_per_token`` are device-seconds of gradient. ``streaming``
    means that engines that the tail has freed start gradients."""

    prompts: int
    responses: int
    engines: int
    latency: LatencyCurve
    train_seconds_per_token: float = 0.0
    streaming: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a step's rounds run: ``exact`` (etas 1), ``prompts`` (responses 1) or ``race``."""

    mode: Literal["exact", "prompts", "race"] = "exact"
    eta_prompts: float = 1.0
    eta_responses: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Mean step time of ``exact`` over that of a choice, and its kept over true mean length."""

    gain: float
    kept_vs_true: float


class StepTime:
    """Seconds of steps of one workload, from when each attempt stops."""

    def __init__(self, work: RoundCosts, most: int) -> None:
        self._work = work
        every = [work.latency.at(math.ceil(n / work.engines)) for n in range(most + 1)]
        self._decode = np.array(every)
        self._tail = 0
        if work.streaming:
            largest = min(most, work.latency.largest * work.engines)
            self._tail = consolidation_threshold(work.latency.at, work.engines, largest)
            self._decode[: self._tail + 1] = [work.latency.at(n) for n in range(self._tail + 1)]

    def mean(self, stops: Lengths, trained: Lengths) -> float:
        """Mean seconds of rounds: ``stops`` (rounds, attempts) and ``trained`` tokens (rounds,)."""
        ordered = np.sort(stops, axis=1)
        ticks: Lengths = np.diff(ordered, axis=1, prepend=0.0)
        running: NDArray[np.int64] = np.arange(stops.shape[1], 0, -1, dtype=np.int64)
        seconds: Lengths = ticks * self._decode[running]
        in_tail = running <= self._tail
        freed: Lengths = seconds[:, in_tail].sum(axis=1) * (self._work.engines - 1)
        training = trained * self._work.train_seconds_per_token
        rest: Lengths = np.maximum(0.0, training - freed) / self._work.engines
        total: Lengths = seconds.sum(axis=1) + rest
        return float(total.mean())


@dataclass(frozen=True, slots=True, eq=False)
class SyntheticRounds:
    """Lengths of rounds, shape (rounds, prompts, responses): the first try and a re-run."""

    first: Lengths
    again: Lengths

    @classmethod
    def draw(
        cls,
        true: KaplanMeier,
        icc: float,
        shape: tuple[int, int, int],
        rng: np.random.Generator,
    ) -> SyntheticRounds:
        """Draw lengths of distribution ``true`` whose intraclass correlation is ``icc``."""
        by_score = true.quantile(_PROBABILITIES).astype(np.float64)
        rho = copula_correlation(by_score, icc)
        own = math.sqrt(rho) * rng.standard_normal((*shape[:2], 1))

        def lengths() -> Lengths:
            scores = own + math.sqrt(1.0 - rho) * rng.standard_normal(shape)
            return np.interp(scores, _SCORES, by_score)

        return cls(lengths(), lengths())


def copula_correlation(by_score: Lengths, icc: float) -> float:
    """Normal correlation that gives lengths the correlation ``icc``. ``by_score`` are lengths at
    the grid of normal scores. The correlation of two lengths is a power series in that of their
    scores, by Hermite polynomials (Mehler's formula)."""
    weighted = by_score * np.diff(_PROBABILITIES, prepend=0.0)
    power = np.empty(_TERMS)
    lower, current = np.ones_like(_SCORES), _SCORES.copy()
    for k in range(1, _TERMS + 1):
        power[k - 1] = float(weighted @ current) ** 2
        lower, current = current, (_SCORES * current - math.sqrt(k) * lower) / math.sqrt(k + 1)
    if power.sum() <= 0.0:
        return icc
    rho = np.linspace(0.0, 1.0, 101)
    reached = (rho[:, None] ** np.arange(1, _TERMS + 1)) @ power / power.sum()
    return float(np.interp(icc, reached, rho))


def predict(
    choice: Choice, rounds: SyntheticRounds, work: RoundCosts, time: StepTime
) -> Prediction:
    """The long-run effect of ``choice``, its long rounds included."""
    P0, R0 = work.prompts, work.responses
    exact = rounds.first[:, :P0, :R0]
    base = time.mean(exact.reshape(len(exact), -1), exact.sum(axis=(1, 2)))
    P, R = over_provision(P0, choice.eta_prompts), over_provision(R0, choice.eta_responses)
    tries = np.sort(rounds.first[:, :P, :R], axis=2)
    done = tries[:, :, R0 - 1]
    order = np.argsort(done, axis=1, kind="stable")
    end = np.take_along_axis(done, order[:, P0 - 1 : P0], axis=1)
    stops = np.minimum(tries, np.minimum(done, end)[:, :, None])
    kept = np.take_along_axis(tries[:, :, :R0], order[:, :P0, None], axis=1)
    seconds = time.mean(stops.reshape(len(stops), -1), kept.sum(axis=(1, 2)))
    length = float(kept.mean())
    if P > P0:
        losers = np.take_along_axis(rounds.again[:, :P, :R0], order[:, P0:, None], axis=1)
        long = _long_rounds(losers.reshape(-1, R0), P0)
        share = (P - P0) / P
        seconds += share * (time.mean(long, long.sum(axis=1)) - seconds)
        length += share * (float(losers.mean()) - length)
    return Prediction(gain=_ratio(base, seconds), kept_vs_true=_ratio(length, float(tries.mean())))


def _ratio(part: float, whole: float) -> float:
    """1 if all responses are empty, as nothing takes time or is biased."""
    return part / whole if whole else 1.0


def _long_rounds(losers: Lengths, prompts: int) -> Lengths:
    count = max(1, len(losers) // prompts)
    return np.resize(losers, (count, prompts * losers.shape[1]))


class AutoMode:
    """Chooses mode and over-provisioning for mode ``auto``. The same inputs give the same choice.
    It stays ``exact`` until enough is known, while the gain is small, and for ``_HOLD`` steps after
    an alarm. Only a clearly better choice replaces the present one."""

    def __init__(self, config: TailBatchingConfig) -> None:
        self._config = config
        self._choice = Choice()
        self._prediction = Prediction(gain=1.0, kept_vs_true=1.0)
        self._next = 0
        self._icc: float | None = None
        self._harsher = 1.0

    def choose(
        self,
        step: int,
        history: LengthHistory,
        work: RoundCosts,
        rng: np.random.Generator,
        measured: Bias | None = None,
    ) -> Choice:
        """The choice for ``step``. Draws from ``rng`` only if a decision is due."""
        if measured is not None and measured.alarms:
            self._stay_exact(step + _HOLD)
        if step < self._next:
            return self._choice
        self._next = step + _EVERY
        if len(history.unselected_groups()) >= ENOUGH_GROUPS:
            self._icc = history.icc()
        if self._icc is None or len(history) < _ENOUGH_ATTEMPTS:
            return self._choice
        if measured is not None:
            self._learn(measured)
        self._decide(self._predictions(history, work, self._icc, rng))
        return self._choice

    def _stay_exact(self, until: int) -> None:
        if self._choice != Choice():
            self._choice, self._next = Choice(), until
            self._prediction = Prediction(gain=1.0, kept_vs_true=1.0)

    def _learn(self, measured: Bias) -> None:
        if self._choice == Choice() or "len" not in measured.audited:
            return
        predicted = max((1.0 - self._prediction.kept_vs_true) / self._harsher, _LEAST_LOSS)
        trust = measured.audits / (measured.audits + _AUDITS_HALF_TRUSTED)
        ratio = (1.0 - measured.audited["len"]) / predicted
        self._harsher = min(_HARSHEST, max(1.0, 1.0 + trust * (ratio - 1.0)))

    def _predictions(
        self, history: LengthHistory, work: RoundCosts, icc: float, rng: np.random.Generator
    ) -> dict[Choice, Prediction]:
        candidates = list(self._candidates(work))
        P = max(over_provision(work.prompts, choice.eta_prompts) for choice in candidates)
        R = max(over_provision(work.responses, choice.eta_responses) for choice in candidates)
        count = min(_MOST_ROUNDS, max(_LEAST_ROUNDS, _DRAWS // (P * R)))
        rounds = SyntheticRounds.draw(history.distribution(), icc, (count, P, R), rng)
        time = StepTime(work, P * R)
        return {choice: self._predict(choice, rounds, work, time) for choice in candidates}

    def _predict(
        self, choice: Choice, rounds: SyntheticRounds, work: RoundCosts, time: StepTime
    ) -> Prediction:
        raw = predict(choice, rounds, work, time)
        kept = 1.0 - self._harsher * (1.0 - raw.kept_vs_true)
        return Prediction(gain=raw.gain, kept_vs_true=kept)

    def _candidates(self, work: RoundCosts) -> Iterator[Choice]:
        yield Choice()
        etas_p = _etas(work.prompts, self._config.eta_prompts)
        for eta in etas_p:
            yield Choice(mode="prompts", eta_prompts=eta)
        if self._config.race_responses:
            for eta_r in _etas(work.responses, self._config.eta_responses):
                for eta_p in (1.0, *etas_p):
                    yield Choice(mode="race", eta_prompts=eta_p, eta_responses=eta_r)

    def _decide(self, predictions: dict[Choice, Prediction]) -> None:
        limit = self._config.bias_limit
        now = self._choice
        best, gain = Choice(), 1.0
        for choice, found in predictions.items():
            # Entering needs more than staying, so that noise does not make it flap.
            needed = limit if choice == now else limit + _BIAS_MARGIN * (1.0 - limit)
            least = _LEAVE if choice == now else _ENTER
            worth = found.gain * (_STAY_BONUS if choice == now else 1.0)
            if choice.mode != "exact" and found.kept_vs_true >= needed and found.gain >= least:
                best, gain = max((best, gain), (choice, worth), key=lambda pair: pair[1])
        self._choice, self._prediction = best, predictions[best]

    def state_dict(self) -> dict[str, Any]:
        return {
            "choice": asdict(self._choice),
            "prediction": asdict(self._prediction),
            "next": self._next,
            "icc": self._icc,
            "harsher": self._harsher,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choice = Choice(**state["choice"])
        self._prediction = Prediction(**state["prediction"])
        self._next = state["next"]
        self._icc = state["icc"]
        self._harsher = state["harsher"]


def _etas(kept: int, largest: float) -> list[float]:
    by_count = {over_provision(kept, eta): eta for eta in (*_ETAS, largest) if 1.0 < eta <= largest}
    return [eta for count, eta in by_count.items() if count > kept]


_SCORES: NDArray[np.float64] = np.linspace(-6.0, 6.0, 2401)
_PROBABILITIES: NDArray[np.float64] = np.array([NormalDist().cdf(float(z)) for z in _SCORES])
_TERMS = 24  # Terms of the power series. Twice as many move the 8k fit's correlation by 0.0002.
_ETAS = (1.03125, 1.0625, 1.125, 1.1875, 1.25, 1.5, 2.0)
"""Factors that are tried, beside the configured maximum."""

# Noise of a prediction (8k fit, 64 prompts of 8, eta 1.125): over seeds of the synthetic rounds the
# gain of 1.21 has a standard deviation of 0.014, the kept length of 0.93 one of 0.004. Over
# histories of 10 steps they are 0.029 and 0.003. Over 15 such histories the choice changed twice
# with the rules below, five times without them (``test_it_does_not_flap``).
_ENTER = 1.05  # gain from which racing begins: about three deviations above none
_LEAVE = 1.03  # gain below which it ends
_STAY_BONUS = 1.1  # factor for the present choice's gain: three deviations over histories
_BIAS_MARGIN = 0.1
"""Share of the allowed loss of length that an entry leaves free: 0.01 at a limit of 0.9, two to
three deviations."""
_DRAWS = 30_000
"""Lengths drawn for a prediction. Ten times as many take 200 ms and have a third of the noise."""
_MOST_ROUNDS, _LEAST_ROUNDS = 128, 4  # into which the draws are cut

# Chosen without an experiment.
_EVERY = 10  # steps between decisions
_ENOUGH_ATTEMPTS = 200
"""Lengths seen before the first choice: two of a distribution's last hundredth."""
_HOLD = 100  # steps without racing after an alarm: about 14 audits at the default ``audit_every``
_AUDITS_HALF_TRUSTED = 6
"""Audits that weigh as much as the prediction, and as many as the first alarm takes."""
_LEAST_LOSS = 0.005  # predicted loss of length below which the audits' ratio to it would be noise
_HARSHEST = 10.0  # largest factor of audits on a predicted loss


class Measurements:
    """Follows a job's events and decisions. ``audited`` are prompts of this round without
    aborts."""

    def __init__(
        self,
        settings: RolloutSettings,
        ledger: Ledger,
        audited: Callable[[], Collection[PromptId]],
        rule: OwnRule | None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._latency = LatencyCurve(settings.latency)
        self._audited = audited
        self._rule = rule
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
        tail = self._settings.rollout.tail_batching
        audits = tail.audit_prompts if is_audit_step(event.step, tail.audit_every) else 0
        return self._racing(event), 0 if self._carries else audits

    def _racing(self, event: ev.StepStarted) -> Racing:
        if self._rule is not None:
            return self._rule.start(event.step, self.history)
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
            case _:
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
        """Record a response, unless an earlier round completed it."""
        if event.carried and event.carried == event.tokens:
            return
        ledger = self._ledger
        source = "audit" if of.prompt in self._audited() else ledger.kind
        truncated = event.finish_reason == "length"
        self.history.observe(of.prompt, event.tokens, False, source, ledger.step, truncated)

    def aborted(self, event: ev.AttemptAborted, of: Attempt) -> None:
        """Record an aborted attempt, unless it had finished or continues in the next round."""
        ledger = self._ledger
        if of.finish_reason is None and not self._carries:
            self.history.observe(of.prompt, event.tokens, True, ledger.kind, ledger.step)

    def accumulated(self, event: ev.GradientsAccumulated) -> None:
        self._train_s += event.seconds
        self._train_tokens += sum(map(self._tokens, event.parts))

    def _tokens(self, part: GroupPart) -> int:
        kept = self._ledger.kept[part.prompt]
        return sum(attempt.tokens for attempt in kept[part.start : part.stop])

    def finish(self, decision: do.FinishRollout) -> None:
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
        return {
            "history": self.history.state_dict(),
            "meter": self._meter.state_dict(),
            "admission": self._auto.state_dict(),
            "train": [self._train_s, self._train_tokens],
            "rule": {} if self._rule is None else self._rule.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history.load_state_dict(state["history"])
        self._meter.load_state_dict(state["meter"])
        self._auto.load_state_dict(state["admission"])
        self._train_s, self._train_tokens = state["train"]
        if self._rule is not None:
            self._rule.load_state_dict(state["rule"])


def _response(attempt: Attempt) -> Response:
    return Response(float(attempt.tokens), float(attempt.turns), attempt.wait_s)
