"""Which mode to use, from what each was estimated to gain, and why, in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollpacker.polytrace.statistics.statistics import Dependence

_SAME = 1.02
"""Speeds that differ by less are taken to be the same."""
_WORTH_IT = 1.05
_FEW = 100
"""Responses of which hardly one is of the longest hundredth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeEstimate:
    """One mode against ``off``, on the same prompts.

    Args:
        speedup: mean seconds of a step of ``off`` over the mode's.
        kept_vs_true_len: mean length of the responses trained on over that of all.
        step_s: mean seconds of a step.
        decoded_vs_kept: tokens decoded, aborted ones too, over tokens kept.
        tool_wait_s: mean seconds of a step in which an engine only waits for tools.
        stale: share of the tokens trained on that earlier weights have sampled.
    """

    speedup: float
    kept_vs_true_len: float
    step_s: float
    decoded_vs_kept: float
    tool_wait_s: float = 0.0
    stale: float = 0.0


def recommend(modes: Mapping[str, ModeEstimate], limit: float) -> str:
    """The fastest mode that keeps ``limit`` of the true mean length.

    ``exact`` where the fastest gains less than 2% on it; ``off`` where that loses more than 2%.
    """
    fair = {name: each.speedup for name, each in modes.items() if each.kept_vs_true_len >= limit}
    best = max(fair, key=fair.__getitem__, default="exact")
    if "exact" in fair and fair[best] < _SAME * fair["exact"]:
        best = "exact"
    return best if modes[best].speedup > 2.0 - _SAME else "off"


def sentences(
    modes: Mapping[str, ModeEstimate],
    recommended: str,
    *,
    partial: ModeEstimate | None = None,
    ahead: Mapping[str, ModeEstimate],
    left_out: str,
    at_most: bool = False,
    depends: Dependence | None,
    read: int,
    limit: float,
    aborted: float = 0.0,
) -> list[str]:
    """The estimate in plain words, one to seven sentences.

    ``partial`` is that mode, None where it was not simulated; ``ahead`` is ``exact`` with engines
    that decode ahead, by tokens of a decode step; ``left_out`` what the simulation does not have;
    ``at_most`` whether speeds are upper bounds; ``depends`` says what lengths of the trace are,
    None where unknown; ``read`` how many responses it has, and ``aborted`` the share that were.
    """
    exact, chosen = modes["exact"], modes[recommended]
    races = {name: modes[name] for name in ("race", "prompts")}
    best = max(races, key=lambda name: races[name].speedup)
    told: list[str] = []
    pays = recommended not in ("off", "exact") or races[best].speedup > _WORTH_IT * exact.speedup
    if not pays:
        told.append(
            f"Racing does not pay here: the best race ({best}) is "
            f"{races[best].speedup / exact.speedup:.2f}x as fast as exact rounds."
        )
    if read < _FEW:
        told.append(
            f"Only {read} finished responses were read: a log of more steps says more of the tail."
        )
    told.append(_use(recommended, chosen, left_out, "at most" if at_most else "about"))
    tempting = _SAME * max(1.0, chosen.speedup)
    biased = [n for n, r in races.items() if r.kept_vs_true_len < limit and r.speedup > tempting]
    for name in biased[:1] if pays else ():
        gain = f"{'may' if at_most else 'would'} be faster ({races[name].speedup:.2f}x"
        told.append(
            f"Mode {name} {gain}{' at most' if at_most else ''}) but trains on responses of "
            f"{races[name].kept_vs_true_len:.2f} of the true mean length{_cause(depends)}."
        )
    most = "at most " if at_most else ""
    if partial is not None and partial.speedup > tempting:
        told.append(_partial(partial, most))
    told += _ahead(ahead, exact.speedup, most)
    if aborted >= 0.01:
        told.append(
            f"{aborted:.0%} of the responses were aborted and are left out, so true lengths are "
            "longer: estimate from a run of mode off or exact."
        )
    return told


def _use(recommended: str, chosen: ModeEstimate, left_out: str, how: str) -> str:
    if recommended == "off":
        return (
            "No mode is faster than plain synchronous rounds; leave tail batching off "
            f"(left out: {left_out})."
        )
    gain = f"{how} {chosen.speedup:.2f}x faster than synchronous rounds"
    if chosen.speedup < _SAME:
        gain = "it is as fast as synchronous rounds"
    return f"Use {recommended}: {gain}, {_keeps(chosen)} (left out: {left_out})."


def _cause(depends: Dependence | None) -> str:
    """Why a race leaves long responses out and not only long prompts."""
    if depends is None or depends == "a property of the prompt":
        return ""
    return f" since length is {'only ' if depends.startswith('partly') else ''}{depends}"


def _partial(found: ModeEstimate, most: str) -> str:
    return (
        f"Partial rollouts would make it {most}{found.speedup:.2f}x, with {found.stale:.0%} of the "
        "tokens from earlier weights: mode partial is there to compare with, and not on-policy."
    )


def _ahead(ahead: Mapping[str, ModeEstimate], exact: float, most: str) -> list[str]:
    """Whether it would pay at least somewhere."""
    gains = {tokens: mode.speedup for tokens, mode in ahead.items()}
    if max(gains.values(), default=0.0) < _SAME * exact:
        return []
    each = ", ".join(f"{speedup:.2f}x at {tokens}" for tokens, speedup in gains.items())
    return [
        f"Decoding ahead, which changes no distribution, would make exact {most}{each} tokens of a "
        "decode step; the engine mini does it, and vLLM on CPUs."
    ]


def _keeps(mode: ModeEstimate) -> str:
    if mode.kept_vs_true_len > 0.995:
        return "and no response is lost"
    return f"keeping {mode.kept_vs_true_len:.2f} of the true mean length"
