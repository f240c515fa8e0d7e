"""Statistics of response lengths, and the effect of racing on them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollpacker.core.groups import intraclass_correlation
from rollpacker.core.types import PromptId, RoundKind

FINISHED, TRUNCATED, CENSORED = 0, 1, 2
"""An attempt ended by itself, at the length cap, or by an abort."""


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Lengths in tokens and how each ended, shapes (N,)."""

    lengths: NDArray[np.int64]
    ends: NDArray[np.int8]

    @classmethod
    def of(cls, lengths: ArrayLike, ends: ArrayLike | None = None) -> Observations:
        values = np.asarray(lengths, np.int64)
        flags = np.zeros(values.shape, np.int8) if ends is None else np.asarray(ends, np.int8)
        return cls(values, flags)

    @classmethod
    def joined(cls, parts: Iterable[Observations]) -> Observations:
        pieces = list(parts)
        if not pieces:
            return cls.of([])
        return cls(
            np.concatenate([part.lengths for part in pieces]),
            np.concatenate([part.ends for part in pieces]),
        )

    def __len__(self) -> int:
        return int(self.lengths.size)


@dataclass(frozen=True, slots=True, eq=False)
class KaplanMeier:
    """The estimated distribution of lengths.

    Args:
        survival: ``survival[t] = P(length > t)``, shape (longest + 1,), with a last entry of 0.
        truncated: estimated share of responses that reach the cap.
    """

    survival: NDArray[np.float64]
    truncated: float

    @classmethod
    def fit(cls, fresh: Observations, rerun: Observations, cap: int | None = None) -> KaplanMeier:
        """Estimate from short, full and audited attempts (``fresh``) and long rounds (``rerun``).

        Long rounds hold the losers of short ones, a biased sample. Their hazards count only if too
        few fresh attempts are still at risk. An unknown tail is taken as exponential, up to ``cap``
        tokens (Brown, Hollander and Korwar, 1974). Raises ``ValueError`` without observations.
        """
        if not len(fresh) and not len(rerun):
            raise ValueError("no lengths observed yet")
        size = 1 + int(max(part.lengths.max() for part in (fresh, rerun) if len(part)))
        ended, cut, at_risk = _counts(fresh, size)
        more_ended, more_cut, more_at_risk = _counts(rerun, size)
        enough = max(_LEAST_AT_RISK, _LEAST_SHARE * len(fresh))
        with_rerun = (at_risk < enough) & (more_at_risk > 0)
        ended = ended + np.where(with_rerun, more_ended, 0)
        cut = cut + np.where(with_rerun, more_cut, 0)
        at_risk = np.maximum(at_risk + np.where(with_rerun, more_at_risk, 0), 1)
        survival = np.cumprod(1.0 - (ended + cut) / at_risk).astype(np.float64)
        before = np.concatenate(([1.0], survival[:-1]))
        truncated = float(np.sum(before * cut / at_risk))
        return cls(_completed(survival, cap), min(1.0, truncated))

    def at(self, length: ArrayLike) -> NDArray[np.float64]:
        """``P(L > length)``."""
        index = np.asarray(length, np.int64)
        inside = self.survival[np.clip(index, 0, self.survival.size - 1)]
        return np.where(index < 0, 1.0, inside)

    def mean(self) -> float:
        """In tokens."""
        return float(self.survival.sum())

    def quantile(self, q: ArrayLike) -> NDArray[np.int64]:
        """Shortest length ``t`` with ``P(L <= t) >= q``."""
        wanted = 1.0 - np.asarray(q, np.float64)
        found = np.searchsorted(-self.survival, -(wanted + 1e-12), side="left")
        return np.minimum(found, self.survival.size - 1).astype(np.int64)


def _completed(survival: NDArray[np.float64], cap: int | None) -> NDArray[np.float64]:
    left, known = float(survival[-1]), survival.size
    if left >= 1.0:
        longest = cap or known
        return np.concatenate((np.ones(max(known, longest)), [0.0]))
    if left > 0.0:
        rate = -np.log(left) / known
        end = int(known * np.log(_NEGLIGIBLE) / np.log(left)) if left > _NEGLIGIBLE else known
        end = max(known, end if cap is None else min(end, cap))
        survival = np.concatenate((survival, np.exp(-rate * np.arange(known + 1, end + 1)), [0.0]))
    first_zero = int(np.argmax(survival <= 0.0))
    return survival[: first_zero + 1]


def _counts(
    seen: Observations, size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    finished = np.bincount(seen.lengths[seen.ends == FINISHED], minlength=size)
    truncated = np.bincount(seen.lengths[seen.ends == TRUNCATED], minlength=size)
    everything = np.bincount(seen.lengths, minlength=size)
    return finished, truncated, np.cumsum(everything[::-1])[::-1]


_NEGLIGIBLE = 1e-4
_LEAST_AT_RISK = 20
_LEAST_SHARE = 0.005


Source = RoundKind | Literal["audit"]
"""The kind of a length's round, or an audit (a prompt of a raced round that runs without
aborts)."""

ENOUGH_GROUPS = 16  # prompts needed for a useful correlation


@dataclass(slots=True)
class _Round:
    step: int
    source: str
    lengths: dict[PromptId, list[int]] = field(default_factory=dict[PromptId, list[int]])
    ends: dict[PromptId, list[int]] = field(default_factory=dict[PromptId, list[int]])

    def observations(self) -> Observations:
        return Observations.of([*chain(*self.lengths.values())], [*chain(*self.ends.values())])


class LengthHistory:
    """Response lengths of the last ``window`` steps, at most ``cap`` tokens (None if unknown)."""

    def __init__(self, cap: int | None = None, window: int = 20) -> None:
        self._cap = cap
        self._window = window
        self._rounds: dict[tuple[int, str], _Round] = {}
        self._cache: dict[str, Any] = {}
        self._step = -1

    def observe(
        self,
        prompt: PromptId,
        length: int,
        censored: bool,
        kind: Source,
        step: int,
        truncated: bool = False,
    ) -> None:
        """Take one attempt that ended (``truncated``: at the cap) or was aborted (``censored``)."""
        if step > self._step:
            self._begin(step)
        self._cache.clear()
        key = (step, str(kind))
        seen = self._rounds.get(key)
        if seen is None:
            seen = self._rounds[key] = _Round(*key)
        end = CENSORED if censored else TRUNCATED if truncated else FINISHED
        seen.lengths.setdefault(prompt, []).append(length)
        seen.ends.setdefault(prompt, []).append(end)

    def _begin(self, step: int) -> None:
        for key in [key for key in self._rounds if key[0] <= step - self._window]:
            del self._rounds[key]
        self._step = step

    def __len__(self) -> int:
        return sum(len(group) for seen in self._rounds.values() for group in seen.lengths.values())

    def seen(self, *kinds: Source) -> Observations:
        names = {str(kind) for kind in kinds}
        return Observations.joined(
            seen.observations()
            for seen in self._rounds.values()
            if not names or seen.source in names
        )

    def distribution(self) -> KaplanMeier:
        """The true length distribution. Raises ``ValueError`` before the first observation."""
        if "distribution" not in self._cache:
            fresh = self.seen(RoundKind.SHORT, RoundKind.FULL, "audit")
            rerun = self.seen(RoundKind.LONG)
            self._cache["distribution"] = KaplanMeier.fit(fresh, rerun, self._cap)
        return self._cache["distribution"]

    def icc(self) -> float:
        """Intraclass correlation of length within a prompt, 0 to 1. 0 if not known."""
        if "icc" not in self._cache:
            self._cache["icc"] = known_correlation(self.complete_groups())
        return self._cache["icc"]

    def complete_groups(self) -> list[NDArray[np.float64]]:
        """Lengths of each unraced prompt of the window whose attempts all ended. Long rounds hold
        only losers, which lowers their correlation. They are left out if there are enough others
        (``ENOUGH_GROUPS``)."""
        groups = self.unselected_groups()
        if len(groups) >= ENOUGH_GROUPS:
            return groups
        return [*groups, *self._groups(RoundKind.LONG)]

    def unselected_groups(self) -> list[NDArray[np.float64]]:
        return [*self._groups(RoundKind.FULL), *self._groups("audit")]

    def _groups(self, kind: Source) -> Iterator[NDArray[np.float64]]:
        for seen in self._rounds.values():
            if seen.source == str(kind):
                for prompt, ends in seen.ends.items():
                    if len(ends) > 1 and CENSORED not in ends:
                        yield np.asarray(seen.lengths[prompt], np.float64)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "rounds": [
                {
                    "step": seen.step,
                    "source": seen.source,
                    "lengths": {prompt: list(group) for prompt, group in seen.lengths.items()},
                    "ends": {prompt: list(group) for prompt, group in seen.ends.items()},
                }
                for seen in self._rounds.values()
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
        self._rounds = {(seen["step"], seen["source"]): _Round(**seen) for seen in state["rounds"]}
        self._cache.clear()


def shrunk_mean(own: float, count: int, grand: float, icc: float) -> float:
    """Empirical-Bayes mean of a prompt from ``count`` responses (James and Stein, 1961)."""
    trust = count * icc / (1.0 + (count - 1) * icc)
    return grand + trust * (own - grand)


def known_correlation(groups: Sequence[NDArray[np.float64]]) -> float:
    """Intraclass correlation over groups of two or more, clipped to 0..1. 0 with fewer than two
    groups or without any variance."""
    if len(groups) < 2:
        return 0.0
    numbers = np.repeat(np.arange(len(groups)), [group.size for group in groups])
    found = intraclass_correlation(np.concatenate(groups), numbers)
    return min(1.0, max(0.0, found)) if math.isfinite(found) else 0.0


_FIRST_AUDITS, _FIRST_LIMIT = 6, 0.85
_LATER_AUDITS, _LATER_LIMIT = 20, 0.95
_WINDOW = 20  # steps that a measurement pools: several cycles of short and long rounds
_ADVICE = {
    "race": "lower rollout.tail_batching.eta_responses",
    "prompts": "lower rollout.tail_batching.eta_prompts",
    "auto": "raise rollout.tail_batching.bias_limit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Kept against estimated true lengths, over the last steps.

    Args:
        censored: whether any attempt was aborted. Otherwise the ratios are 1 by construction.
        kept_vs_true_len: mean kept length over estimated true mean length.
        audited: kept over true on audited prompts: ``len``, and an environment's ``turns`` and
            ``wait``. A long wait loses a race however few tokens a response has.
        audits: audits in these ratios, the last twenty at most.
        alarms: each problem, and the key to change.
    """

    censored: bool = False
    kept_vs_true_len: float = 1.0
    audited: Mapping[str, float] = field(default_factory=dict[str, float])
    audits: int = 0
    alarms: tuple[str, ...] = ()


class Response(NamedTuple):
    """Tokens of an audited response, its environment's turns, and seconds that it waited."""

    len: float
    turns: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A prompt of a raced round whose attempts all ran to their end.

    Args:
        ended: all its attempts.
        kept: those that the race would have kept. None if the prompt would have lost.
    """

    ended: tuple[Response, ...]
    kept: tuple[Response, ...] | None


class _Audit(NamedTuple):
    kept: float
    true: float


def is_audit_step(step: int, every: int) -> bool:
    """Whether the short round of ``step`` is audited. ``every`` 0 is never."""
    return every > 0 and step > 0 and step % every == 0


class BiasMeter:
    """Measures bias every step, from the kept lengths and from the history of all attempts.

    Args:
        mode: of tail batching, for the key that an alarm names.
        history: must have every attempt of a step before the step is measured.
        limit: lowest ratio over twenty audits without an alarm. Mode ``auto`` passes its
            ``bias_limit`` if that is lower.
    """

    def __init__(self, mode: str, history: LengthHistory, limit: float = _LATER_LIMIT) -> None:
        self._advice = _ADVICE.get(mode, "change rollout.tail_batching.mode")
        self._limit = limit
        self._history = history
        self._kept: deque[NDArray[np.int64]] = deque(maxlen=_WINDOW)
        self._audits = {name: deque[_Audit](maxlen=_LATER_AUDITS) for name in Response._fields}

    def measure(self, kept: ArrayLike, audited: Sequence[Audited] = ()) -> Bias:
        self._kept.append(np.asarray(kept, np.int64))
        heard = [prompt for prompt in audited if prompt.ended]
        if heard:
            self._audit(heard)
        ratios = {name: _ratio(audits) for name, audits in self._audits.items()}
        found = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        audits = len(self._audits["len"])
        everything = np.concatenate(self._kept)
        if not everything.size or not np.any(self._history.seen().ends == CENSORED):
            return Bias(audited=found, audits=audits)
        return Bias(
            censored=True,
            kept_vs_true_len=float(everything.mean()) / self._history.distribution().mean(),
            audited=found,
            audits=audits,
            alarms=tuple(self._alarms(found)),
        )

    def _audit(self, audited: Sequence[Audited]) -> None:
        icc = self._history.icc()
        for name, audits in self._audits.items():
            means = [_mean(prompt.ended, name) for prompt in audited]
            grand = float(np.mean(means))
            if name == "len" and len(self._history):
                grand = self._history.distribution().mean()
            kept = [
                # A loser is sampled again in a long round, without racing.
                shrunk_mean(mean, len(prompt.ended), grand, icc)
                if prompt.kept is None
                else _mean(prompt.kept, name)
                for prompt, mean in zip(audited, means, strict=True)
            ]
            audits.append(_Audit(math.fsum(kept), math.fsum(means)))

    def _alarms(self, found: Mapping[str, float]) -> list[str]:
        """Alarms do not cover waiting, as a tool's slowness is not part of learning."""
        audits, limit, ratios = _LATER_AUDITS, self._limit, found
        length = self._audits["len"]
        if len(length) < _LATER_AUDITS:
            audits, limit = _FIRST_AUDITS, min(_FIRST_LIMIT, self._limit)
            first = _ratio([*length][:audits]) if len(length) >= audits else None
            ratios = {} if first is None else {"len": first}
        return [
            f"audited kept/true {what} {ratios[name]:.3f} < {limit} over {audits} audits: "
            f"{self._advice}"
            for name, what in (("len", "length"), ("turns", "turns"))
            if ratios.get(name, limit) < limit
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "kept": [lengths.tolist() for lengths in self._kept],
            "audits": {name: [*audits] for name, audits in self._audits.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.clear()
        self._kept.extend(np.asarray(lengths, np.int64) for lengths in state["kept"])
        for name, audits in self._audits.items():
            audits.clear()
            audits.extend(_Audit(*audit) for audit in state["audits"][name])


def _mean(responses: Sequence[Response], name: str) -> float:
    return float(np.mean([getattr(response, name) for response in responses]))


def _ratio(audits: Sequence[_Audit]) -> float | None:
    true = math.fsum(audit.true for audit in audits)
    return math.fsum(audit.kept for audit in audits) / true if true > 0.0 else None
