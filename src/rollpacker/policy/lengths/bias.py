"""How much racing bends the lengths that are trained on; alarms that name the knob."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollpacker.config.rollout import TailMode
from rollpacker.core.types import RoundKind
from rollpacker.policy.lengths.censoring import CENSORED, censoring_weights, effective_sample_size
from rollpacker.policy.lengths.lengths import LengthHistory, shrunk_mean

_FIRST_AUDITS, _FIRST_LIMIT = 6, 0.85
_LATER_AUDITS, _LATER_LIMIT = 20, 0.95
_WINDOW = 20
"""Steps that a measurement pools: several cycles of short and long rounds."""
_UNRACED = 256
_P90_RISE = 1.25
_LONG_ROUNDS = 8
_MOST_LONG = 256
_ADVICE = {
    "race": "lower rollout.tail_batching.eta_responses",
    "prompts": "lower rollout.tail_batching.eta_prompts",
    "auto": "raise rollout.tail_batching.bias_limit",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Kept against estimated true lengths, over the last steps.

    Args:
        censored: whether any attempt was aborted; without, the rest is 1 by construction.
        kept_vs_true_len: mean kept length over estimated true mean length.
        truncated_kept: share of kept responses at the cap.
        truncated_true: estimated share of all responses at the cap.
        effective_sample_size: share of the kept samples that weighting them to the true
            distribution would leave.
        audited_kept_vs_true: the same ratio on audited prompts; None before the first audit.
        audited_talk: likewise for an environment's ``turns`` and ``wait``, where it has any: a race
            is lost by those that it lets wait, however few tokens they sample.
        audits: audits in these ratios, the last twenty at most.
        alarms: what is wrong and the key to change.
    """

    censored: bool = False
    kept_vs_true_len: float = 1.0
    truncated_kept: float = 0.0
    truncated_true: float = 0.0
    effective_sample_size: float = 1.0
    audited_kept_vs_true: float | None = None
    audited_talk: Mapping[str, float] = field(default_factory=dict[str, float])
    audits: int = 0
    alarms: tuple[str, ...] = ()

    @property
    def audited(self) -> dict[str, float]:
        """Kept over true on audited prompts, of what is known: ``len``, ``turns`` and ``wait``."""
        length = self.audited_kept_vs_true
        return {**({} if length is None else {"len": length}), **self.audited_talk}


class Talk(NamedTuple):
    """What an attempt had with its environment: turns, and seconds that it waited."""

    turns: float
    wait: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A prompt of a raced round whose attempts all ran to their end.

    Args:
        lengths: of all its attempts, tokens.
        truncated: which of them reached the cap.
        kept: lengths that the race would have kept; None if the prompt would have lost.
        talk: of all its attempts.
        talk_kept: of those of ``kept``.
    """

    lengths: tuple[int, ...]
    truncated: tuple[bool, ...]
    kept: tuple[int, ...] | None
    talk: tuple[Talk, ...] = ()
    talk_kept: tuple[Talk, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Audit:
    """Sums of the mean lengths of one audit's prompts."""

    kept: float
    true: float


@dataclass(frozen=True, slots=True)
class _Share:
    """``hits`` out of ``count`` responses."""

    count: int
    hits: int

    def __add__(self, other: _Share) -> _Share:
        return _Share(self.count + other.count, self.hits + other.hits)

    @property
    def value(self) -> float:
        return self.hits / self.count if self.count else 0.0


@dataclass(slots=True)
class _Unraced:
    """Some audited responses, at most ``_UNRACED``; the oldest go."""

    lengths: list[int] = field(default_factory=list[int])
    truncated: list[bool] = field(default_factory=list[bool])

    def add(self, prompt: Audited) -> None:
        self.lengths = [*self.lengths, *map(int, prompt.lengths)][-_UNRACED:]
        self.truncated = [*self.truncated, *map(bool, prompt.truncated)][-_UNRACED:]

    def cut(self) -> _Share:
        return _Share(len(self.truncated), sum(self.truncated))

    def longer_than(self, length: float) -> _Share:
        return _Share(len(self.lengths), sum(value > length for value in self.lengths))


def is_audit_step(step: int, every: int) -> bool:
    """Whether the short round of ``step`` is audited; ``every`` 0 is never."""
    return every > 0 and step > 0 and step % every == 0


class BiasMeter:
    """Measures bias every step, from what was kept and from the history of all attempts.

    Args:
        mode: of tail batching; says which knob an alarm names.
        history: has observed every attempt of a step before the step is measured.
        limit: lowest ratio over twenty audits without an alarm; mode ``auto`` gives its
            ``bias_limit`` where that is lower.
    """

    def __init__(self, mode: TailMode, history: LengthHistory, limit: float = _LATER_LIMIT) -> None:
        self._mode: TailMode = mode
        self._limit = limit
        self._history = history
        self._kept: deque[NDArray[np.int64]] = deque(maxlen=_WINDOW)
        self._truncated: deque[int] = deque(maxlen=_WINDOW)
        self._first: list[_Audit] = []
        self._latest: deque[_Audit] = deque(maxlen=_LATER_AUDITS)
        self._talk = {name: deque[_Audit](maxlen=_LATER_AUDITS) for name in Talk._fields}
        self._old = _Unraced()
        self._new = _Unraced()
        self._long: list[_Share] = []

    def measure(
        self,
        kind: RoundKind,
        kept: ArrayLike,
        truncated: Sequence[bool],
        audited: Sequence[Audited] = (),
    ) -> Bias:
        """Measure a step: the lengths that it trains on, which were cut, and its audit if any."""
        lengths = np.asarray(kept, np.int64)
        cut = sum(map(bool, truncated))
        self._kept.append(lengths)
        self._truncated.append(cut)
        if kind == RoundKind.LONG and lengths.size:
            self._long = _merged([*self._long, _Share(lengths.size, cut)])
        heard = [prompt for prompt in audited if prompt.lengths]
        if heard:
            self._audit(heard)
        everything = np.concatenate(self._kept)
        share = sum(self._truncated) / max(1, everything.size)
        if not everything.size or not np.any(self._history.seen().ends == CENSORED):
            return Bias(truncated_kept=share, truncated_true=share, **self._audits())
        true = self._history.distribution()
        return Bias(
            censored=True,
            kept_vs_true_len=float(everything.mean()) / true.mean(),
            truncated_kept=share,
            truncated_true=true.truncated,
            effective_sample_size=effective_sample_size(
                censoring_weights(everything, everything, true)
            ),
            alarms=self._alarms(),
            **self._audits(),
        )

    def _audits(self) -> dict[str, Any]:
        talk = {name: _ratio(audits) for name, audits in self._talk.items()}
        return {
            "audited_kept_vs_true": _ratio(self._latest),
            "audited_talk": {name: ratio for name, ratio in talk.items() if ratio is not None},
            "audits": len(self._latest),
        }

    def weights(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Censoring weights of the responses of the step just measured, shape (N,), about mean 1.

        For mode ``prompts`` only.
        """
        true = self._history.distribution()
        return censoring_weights(lengths, np.concatenate(self._kept), true)

    def _audit(self, audited: Sequence[Audited]) -> None:
        means = [float(np.mean(prompt.lengths)) for prompt in audited]
        grand = self._history.distribution().mean() if len(self._history) else float(np.mean(means))
        icc = self._history.icc()
        kept = [
            # A loser is sampled again in a long round, without racing.
            shrunk_mean(mean, len(prompt.lengths), grand, icc)
            if prompt.kept is None
            else float(np.mean(prompt.kept))
            for prompt, mean in zip(audited, means, strict=True)
        ]
        audit = _Audit(math.fsum(kept), math.fsum(means))
        if len(self._first) < _FIRST_AUDITS:
            self._first.append(audit)
        self._latest.append(audit)
        for name, audits in self._talk.items():
            audits.append(_talk_audit(name, audited, icc))
        for prompt in audited:
            part = self._old if len(self._old.lengths) < _UNRACED else self._new
            part.add(prompt)

    def _alarms(self) -> tuple[str, ...]:
        advice = _ADVICE.get(self._mode, "change rollout.tail_batching.mode")
        first_limit = min(_FIRST_LIMIT, self._limit)
        found = [
            _audit_alarm(self._latest, _LATER_AUDITS, self._limit, advice)
            if len(self._latest) == _LATER_AUDITS
            else _audit_alarm(self._first, _FIRST_AUDITS, first_limit, advice),
            # Not of waiting: how slow a tool was is no part of what is learned.
            _audit_alarm(self._talk["turns"], _LATER_AUDITS, self._limit, advice, "turns"),
            _drift_alarm(self._old, self._new, advice),
            _long_alarm(self._long, advice),
        ]
        return tuple(alarm for alarm in found if alarm)

    def state_dict(self) -> dict[str, Any]:
        """The measurements so far, as JSON; the history is saved on its own."""
        return {
            "kept": [lengths.tolist() for lengths in self._kept],
            "truncated": list(self._truncated),
            "first": [asdict(audit) for audit in self._first],
            "latest": [asdict(audit) for audit in self._latest],
            "talk": {name: [asdict(a) for a in audits] for name, audits in self._talk.items()},
            "old": asdict(self._old),
            "new": asdict(self._new),
            "long": [asdict(share) for share in self._long],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self._kept.clear()
        self._kept.extend(np.asarray(lengths, np.int64) for lengths in state["kept"])
        self._truncated.clear()
        self._truncated.extend(state["truncated"])
        self._first = [_Audit(**audit) for audit in state["first"]]
        self._latest.clear()
        self._latest.extend(_Audit(**audit) for audit in state["latest"])
        for name, audits in self._talk.items():
            audits.clear()
            audits.extend(_Audit(**audit) for audit in state["talk"][name])
        self._old, self._new = _Unraced(**state["old"]), _Unraced(**state["new"])
        self._long = [_Share(**share) for share in state["long"]]


def _ratio(audits: Sequence[_Audit]) -> float | None:
    true = math.fsum(audit.true for audit in audits)
    return math.fsum(audit.kept for audit in audits) / true if true > 0.0 else None


def _talk_audit(name: str, audited: Sequence[Audited], icc: float) -> _Audit:
    """As for lengths, with their share of what differs between prompts."""
    true = [[getattr(talk, name) for talk in prompt.talk] for prompt in audited]
    means = [float(np.mean(values)) for values in true if values]
    grand = float(np.mean(means)) if means else 0.0
    kept = [
        shrunk_mean(float(np.mean(values)), len(values), grand, icc)
        if prompt.talk_kept is None
        else float(np.mean([getattr(talk, name) for talk in prompt.talk_kept]))
        for prompt, values in zip(audited, true, strict=True)
        if values
    ]
    return _Audit(math.fsum(kept), math.fsum(means))


def _audit_alarm(
    audits: Sequence[_Audit], least: int, limit: float, advice: str, what: str = "length"
) -> str | None:
    ratio = _ratio(audits)
    if len(audits) < least or ratio is None or ratio >= limit:
        return None
    return f"audited kept/true {what} {ratio:.3f} < {limit} over {least} audits: {advice}"


def _drift_alarm(old: _Unraced, new: _Unraced, advice: str) -> str | None:
    if min(len(old.lengths), len(new.lengths)) < _UNRACED:
        return None
    if _risen(old.cut(), new.cut()):
        share = f"{old.cut().value:.1%} to {new.cut().value:.1%}"
        return f"truncated share of un-raced responses rose from {share}: {advice}"
    before, after = (float(np.quantile(part.lengths, 0.9)) for part in (old, new))
    if after > _P90_RISE * before and _risen(old.longer_than(before), new.longer_than(before)):
        return f"p90 length of un-raced responses rose from {before:.0f} to {after:.0f}: {advice}"
    return None


def _long_alarm(rounds: Sequence[_Share], advice: str) -> str | None:
    if len(rounds) < _LONG_ROUNDS:
        return None
    ends = [len(rounds) * quarter // 4 for quarter in range(5)]
    parts = [_total(rounds[a:b]) for a, b in itertools.pairwise(ends)]
    if not all(a.value < b.value for a, b in itertools.pairwise(parts)):
        return None
    if not _risen(parts[0], parts[-1]):
        return None
    shares = ", ".join(f"{part.value:.1%}" for part in parts)
    return f"truncation in long rounds rises from quarter to quarter ({shares}): {advice}"


def _risen(old: _Share, new: _Share) -> bool:
    """Whether a share rose by more than a point and three standard errors."""
    pooled = (old + new).value
    error = math.sqrt(pooled * (1.0 - pooled) * (1.0 / old.count + 1.0 / new.count))
    return new.value - old.value > max(0.01, 3.0 * error)


def _total(parts: Sequence[_Share]) -> _Share:
    return sum(parts, start=_Share(0, 0))


def _merged(rounds: list[_Share]) -> list[_Share]:
    """Neighbours put together when there are too many, so that memory stays bounded."""
    if len(rounds) <= _MOST_LONG:
        return rounds
    return [_total(rounds[i : i + 2]) for i in range(0, len(rounds), 2)]
