"""The bubble: the time in which a device neither decodes nor trains."""

from __future__ import annotations

from collections.abc import Collection, Iterable

Span = tuple[float, float]
"""Start and end, seconds of the run's clock."""


def union(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, disjoint and in order."""
    whole: list[Span] = []
    for start, stop in sorted(spans):
        if whole and start <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(stop, whole[-1][1])
        else:
            whole.append((start, stop))
    return whole


def idle_s(spans: Iterable[Span], begin: float, end: float) -> float:
    """Seconds of ``[begin, end]`` that no span covers."""
    idle, covered = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = min(start, end), min(stop, end)
        if start > covered:
            idle += start - covered
        covered = max(covered, stop)
    return idle + max(0.0, end - covered)


def bubble(parts: Collection[tuple[int, Iterable[Span]]], begin: float, end: float) -> float:
    """The idle share, 0 to 1, of the time of all devices that took part in a step.

    Args:
        parts: groups of devices: their number, and their spans of decoding or gradient tasks.
        begin, end: of the step or one of its phases, seconds.
    """
    devices = sum(count for count, _ in parts)
    if end <= begin or not devices:
        return 0.0
    idle = sum(count * idle_s(spans, begin, end) for count, spans in parts)
    return idle / (devices * (end - begin))
