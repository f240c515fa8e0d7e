"""How commands put into words what the daemon tells in numbers."""

from __future__ import annotations

from typing import Any

_MINUTES_S, _HOURS_S = 60.0, 7200.0
"""From which on a duration is told in them."""


def duration(seconds: float) -> str:
    """In the unit in which people would say it."""
    if seconds < _MINUTES_S:
        return f"{seconds:.0f} s"
    if seconds < _HOURS_S:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def missed(job: dict[str, Any]) -> str:
    """Of a job that is over: that its promise was broken; empty where it was not."""
    if job["slo_state"] != "missed":
        return ""
    slowdown = "" if job["slowdown"] is None else f": slowdown {job['slowdown']:.2f}"
    return f"promise (SLO {job['spec']['slo']:g}) missed{slowdown}"
