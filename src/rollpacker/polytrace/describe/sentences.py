"""What a report of a task says, in plain sentences."""

from __future__ import annotations

from collections.abc import Callable

from rollpacker.polytrace.describe.characterize import TaskReport
from rollpacker.polytrace.statistics.statistics import dependence

_SURE = 0.01


def sentences(report: TaskReport) -> list[str]:
    """What to know of a task, most telling first."""
    parts: tuple[Callable[[TaskReport], list[str]], ...] = (
        _lengths,
        _correlation,
        _prediction,
        _waiting,
        _elsewhere,
        _drift,
        _missing,
    )
    return [sentence for part in parts for sentence in part(report)]


def _lengths(report: TaskReport) -> list[str]:
    if report.max == 0.0:
        return ["all responses are empty: the log holds no lengths to go by"]
    told = [
        f"responses have a median of {report.p50:.0f} and a mean of {report.mean:.0f} tokens; one"
        f" in a hundred exceeds {report.p99:.0f}, and the longest, {report.max:.0f}, is"
        f" {report.max_over_median:.1f}x the median"
    ]
    if report.cap_share >= 0.01 and report.cap_guessed:
        told.append(
            f"{report.cap_share:.0%} of the responses are as long as the longest, {report.max:.0f}"
            " tokens: if that is the cap, they were cut off"
        )
    elif report.cap_share >= 0.01:
        told.append(
            f"{report.cap_share:.0%} of the responses were cut off: raise the cap, or"
            " expect truncated answers to be graded as wrong"
        )
    return told


def _correlation(report: TaskReport) -> list[str]:
    depends = dependence(report.icc, report.icc_log)
    if depends is None:
        return [_unknown_correlation(report)]
    return [
        f"length is {depends} (intraclass correlation {report.icc:.2f}, {report.icc_log:.2f} on a"
        " log scale)"
    ]


def _unknown_correlation(report: TaskReport) -> str:
    if report.groups == 0:
        return "prompts have one response each, so nothing is known of the spread within a prompt"
    if report.groups == 1:
        return (
            "only one prompt has several responses, so nothing is known of how prompts differ in"
            " length"
        )
    return "all responses are equally long, so length can be correlated with nothing"


def _prediction(report: TaskReport) -> list[str]:
    told: list[str] = []
    if report.tail_auc_first is not None:
        word = _word(report.tail_auc_first)
        told.append(
            f"the first response to finish tells {word} which prompts hold the tail"
            f" (area under the curve {report.tail_auc_first:.2f})"
        )
    if report.tail_auc_history is not None:
        word = _word(report.tail_auc_history)
        told.append(f"earlier visits tell {word} ({report.tail_auc_history:.2f})")
    return told


def _word(area: float) -> str:
    return "well" if area >= 0.8 else "somewhat" if area >= 0.65 else "hardly"


def _waiting(report: TaskReport) -> list[str]:
    told = [
        f"in synchronous rounds the engines would have nothing to do for {report.idle_fraction:.0%}"
        f" of the time, and {report.bubble_fraction:.0%} of the decode slots' time would be empty"
    ]
    if report.load_imbalance.as_dealt >= 1.1:
        told.append(
            f"the busiest data-parallel rank has {report.load_imbalance.as_dealt:.2f}x the mean"
            f" load; balancing by length would make it {report.load_imbalance.balanced:.2f}x"
        )
    return told


def _elsewhere(report: TaskReport) -> list[str]:
    told = {
        "rewards take {:.0%} of rollout and reward time when one follows the other": (
            report.reward_time_share
        ),
        "tools take {:.1%} of the time of a response": report.tool_latency_share,
        "{:.0%} of the turns' prompt tokens came from the prefix cache": report.prefix_cache_share,
    }
    return [text.format(share) for text, share in told.items() if share is not None]


def _drift(report: TaskReport) -> list[str]:
    if report.drift is None or report.drift.slope_p >= _SURE:
        return []
    way = "grow" if report.drift.slope > 0.0 else "shrink"
    return [f"lengths {way} by about {abs(report.drift.slope):.1%} a step"]


def _missing(report: TaskReport) -> list[str]:
    share = report.aborted / (report.aborted + report.responses)
    if share < 0.01:
        return []
    return [
        f"{share:.0%} of the responses were aborted and are left out: the true lengths are longer"
    ]
