"""What a reward function says beside its scores: TRL's ``log_extra`` and ``log_metric``, and the
other keys of verl's result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.reward.base import GradingError, Scored

_LONGEST = 10_000
"""Characters of one value, so that a reply stays a message and no file."""


class LoggedValues:
    """Collects what one call logs.

    Args:
        count: responses of the call.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._columns: dict[str, list[str]] = {}
        self._metrics: dict[str, list[float]] = {}

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """TRL's: a column of the samples table, one value for each response of the call."""
        self._columns.setdefault(str(column), []).extend(str(v)[:_LONGEST] for v in values)

    def log_metric(self, name: str, value: float) -> None:
        """TRL's: a metric of the step, the mean of all calls. As there, a NaN counts for nothing.

        Raises ``TypeError`` on what is no number.
        """
        number = plain(value)
        if not isinstance(number, bool | int | float):
            raise TypeError(f"log_metric('{name}') takes a number, not {brief(value)}")
        if math.isfinite(number):
            self._metrics.setdefault(str(name), []).append(float(number))

    def attach(self, scores: Sequence[float | None]) -> list[float | Scored | None]:
        """The scores with what was logged; those of a call in which nothing was stay as they are.

        Raises ``GradingError`` when a column has not one value for each response.
        """
        for column, values in self._columns.items():
            if len(values) != self._count:
                raise GradingError(
                    f"log_extra('{column}') got {len(values)} values for {self._count} responses"
                )
        if not self._columns and not self._metrics:
            return list(scores)
        metrics = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        return [
            Scored(
                score=score,
                extra={column: values[place] for column, values in self._columns.items()},
                metrics=metrics,
            )
            for place, score in enumerate(scores)
        ]


def verl_extras(result: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, float]]:
    """Columns and metrics from the keys beside ``score``: what is no number is a column."""
    extra: dict[str, str] = {}
    metrics: dict[str, float] = {}
    for key, value in result.items():
        number = plain(value)
        if key == "score" or value is None:
            continue
        if not isinstance(number, bool | int | float):
            extra[str(key)] = str(value)[:_LONGEST]
        elif math.isfinite(number):
            metrics[f"reward_extra/{key}/mean"] = float(number)
    return extra, metrics


def plain(value: Any) -> Any:
    """A NumPy or torch scalar as Python's; anything else as it is."""
    try:
        return value.item() if hasattr(value, "item") else value
    except (TypeError, ValueError, RuntimeError):  # more than one element
        return value


def brief(value: Any) -> str:
    """A value for an error: its type and its beginning."""
    return f"{type(value).__name__} {value!r}"[:120]
