"""Which mode to use, from what each was estimated to gain, and why, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.polytrace.statistics.statistics import Dependence

AHEAD = "exact, ahead"
"""Name of ``exact`` with engines that decode ahead, where those of the log do not."""
_SIMPLEST = ("exact", "auto", "prompts", "race")
"""What changes less of what is learned comes first."""
_SAME = 1.02
"""Speeds that differ by less are taken to be the same."""
_WORTH_IT = 1.05
_FEW = 100
"""Responses of which hardly one is of the longest hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeEstimate:
    """One mode against ``off``, on the same prompts.

    Args:
        speedup: mean seconds of a step of ``off`` over the mode's; of several jobs the middle.
        low, high: between which that of a run is expected; of a single job its own.
        kept_vs_true_len: mean length of the responses trained on over that of all.
        decoded_vs_kept: tokens decoded, aborted ones too, over tokens kept.
        tool_wait_s: mean seconds of a step in which an engine only waits for tools.
        stale: share of the tokens trained on that earlier weights have sampled.
    """

    speedup: float
    low: float
    high: float
    kept_vs_true_len: float
    step_s: float
    decoded_vs_kept: float
    tool_wait_s: float = 0.0
    stale: float = 0.0

    @property
    def range(self) -> str:
        """In words."""
        return f"{self.low:.2f}x to {self.high:.2f}x"


def recommend(modes: Mapping[str, ModeEstimate], limit: float) -> str:
    """The simplest mode that keeps ``limit`` of the true mean length and is not clearly beaten.

    A mode is where the range of another one begins more than 5% above the end of its own. ``off``
    where the range of the one that would be chosen ends below it.
    """
    fair = [name for name in _SIMPLEST if modes[name].kept_vs_true_len >= limit] or ["exact"]
    best = max(modes[name].low for name in fair)
    chosen = next(name for name in fair if _WORTH_IT * modes[name].high >= best)
    return chosen if modes[chosen].high >= 1.0 else "off"


def sentences(
    modes: Mapping[str, ModeEstimate],
    recommended: str,
    *,
    left_out: str,
    depends: Dependence | None,
    read: int,
    limit: float,
    aborted: float = 0.0,
) -> list[str]:
    """The estimate in plain words, one to seven sentences.

    ``left_out`` is what the simulation does not have; ``depends`` says what lengths of the trace
    are, None where unknown; ``read`` how many responses it has, and ``aborted`` the share that
    were.
    """
    exact, chosen = modes["exact"], modes[recommended]
    races = {name: modes[name] for name in ("race", "prompts")}
    best = max(races, key=lambda name: races[name].speedup)
    told: list[str] = []
    pays = recommended not in ("off", "exact") or races[best].speedup > _WORTH_IT * exact.speedup
    if not pays:
        told.append(
            f"Racing does not pay here: the best race ({best}) is about "
            f"{races[best].speedup / exact.speedup:.2f}x as fast as exact rounds."
        )
    if read < _FEW:
        told.append(
            f"Only {read} finished responses were read: a log of more steps says more of the tail."
        )
    told.append(_use(recommended, chosen, left_out))
    auto = modes.get("auto", exact)
    fair = recommended == "exact" and auto.kept_vs_true_len >= limit
    if fair and auto.speedup > _WORTH_IT * exact.speedup:
        told.append(
            f"Mode auto may be faster ({auto.range}), keeping {auto.kept_vs_true_len:.2f} of the "
            "true mean length, but the ranges do not tell the two apart."
        )
    tempting = _SAME * max(1.0, chosen.speedup)
    biased = [n for n, r in races.items() if r.kept_vs_true_len < limit and r.speedup > tempting]
    for name in biased[:1] if pays else ():
        told.append(
            f"Mode {name} may be faster ({races[name].range}) but trains on responses of "
            f"{races[name].kept_vs_true_len:.2f} of the true mean length{_cause(depends)}."
        )
    partial, ahead = modes.get("partial"), modes.get(AHEAD)
    if partial is not None and partial.speedup > tempting:
        told.append(
            f"Partial rollouts may make it {partial.range}, with {partial.stale:.0%} of the tokens "
            "from earlier weights: mode partial is there to compare with, and not on-policy."
        )
    if ahead is not None and ahead.speedup > _SAME * exact.speedup:
        told.append(
            f"Decoding ahead, which changes no distribution, may make exact {ahead.range}; engines "
            "mini and vLLM do it."
        )
    if aborted >= 0.01:
        told.append(
            f"{aborted:.0%} of the responses were aborted and are left out, so true lengths are "
            "longer: estimate from a run of mode off or exact."
        )
    return told


def _use(recommended: str, chosen: ModeEstimate, left_out: str) -> str:
    if recommended == "off":
        return (
            "No mode is faster than plain synchronous rounds; leave tail batching off "
            f"(left out: {left_out})."
        )
    return (
        f"Use {recommended}: {chosen.range} as fast as synchronous rounds, {_keeps(chosen)} "
        f"(left out: {left_out})."
    )


def _cause(depends: Dependence | None) -> str:
    """Why a race leaves long responses out and not only long prompts."""
    if depends is None or depends == "a property of the prompt":
        return ""
    return f" since length is {'only ' if depends.startswith('partly') else ''}{depends}"


def _keeps(mode: ModeEstimate) -> str:
    if mode.kept_vs_true_len > 0.995:
        return "and no response is lost"
    return f"keeping {mode.kept_vs_true_len:.2f} of the true mean length"
