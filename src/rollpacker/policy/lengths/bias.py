"""How much racing bends the lengths that are trained on; alarms that name the knob."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollpacker.config.rollout import TailMode
from rollpacker.policy.lengths.censoring import CENSORED
from rollpacker.policy.lengths.lengths import LengthHistory, shrunk_mean

_FIRST_AUDITS, _FIRST_LIMIT = 6, 0.85
_LATER_AUDITS, _LATER_LIMIT = 20, 0.95
_WINDOW = 20
"""Steps that a measurement pools: several cycles of short and long rounds."""
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
        audited: kept over true on audited prompts, of what is known: ``len``, and an environment's
            ``turns`` and ``wait``, where it has any: a race is lost by those that it lets wait,
            however few tokens they sample.
        audits: audits in these ratios, the last twenty at most.
        alarms: what is wrong and the key to change.
    """

    censored: bool = False
    kept_vs_true_len: float = 1.0
    audited: Mapping[str, float] = field(default_factory=dict[str, float])
    audits: int = 0
    alarms: tuple[str, ...] = ()


class Response(NamedTuple):
    """Tokens of an audited response, the turns of its environment, and seconds that it waited."""

    len: float
    turns: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """A prompt of a raced round whose attempts all ran to their end.

    Args:
        ended: all its attempts.
        kept: those that the race would have kept; None if the prompt would have lost.
    """

    ended: tuple[Response, ...]
    kept: tuple[Response, ...] | None


class _Audit(NamedTuple):
    """Sums of the means of one audit's prompts."""

    kept: float
    true: float


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
        self._advice = _ADVICE.get(mode, "change rollout.tail_batching.mode")
        self._limit = limit
        self._history = history
        self._kept: deque[NDArray[np.int64]] = deque(maxlen=_WINDOW)
        self._audits = {name: deque[_Audit](maxlen=_LATER_AUDITS) for name in Response._fields}

    def measure(self, kept: ArrayLike, audited: Sequence[Audited] = ()) -> Bias:
        """Measure a step: the lengths that it trains on, and its audit if there was one."""
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
        """Not of waiting: how slow a tool was is no part of what is learned."""
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
        """The measurements so far, as JSON; the history is saved on its own."""
        return {
            "kept": [lengths.tolist() for lengths in self._kept],
            "audits": {name: [*audits] for name, audits in self._audits.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
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
