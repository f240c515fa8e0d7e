"""Compare two timed tables: simulated and measured, or a replay and its original."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rollpacker.polytrace.schema import TraceError

STEP = "step"
METRICS = {STEP: "step_time", "rollout": "timing_s/rollout", "train": "timing_s/train"}
_PHASES = {metric: phase for phase, metric in METRICS.items()}
_SHOWN = 5
_TRACES = "compare takes files of times, not traces: for those, rollpacker trace characterize"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Accuracy of one phase over steps. It is below 0 if the error exceeds the measurement."""

    mean: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Accuracy is ``1 - |predicted - measured| / measured``.

    Args:
        accuracy_mean, accuracy_worst: of the step time, over steps.
        phases: the phases that both sides have, without the whole step.
        instant: phases left out because a step measured 0 s and the prediction was not 0 s.
        total: accuracy of the sum of the step times.
    """

    accuracy_mean: float
    accuracy_worst: float
    phases: dict[str, Accuracy]
    instant: tuple[str, ...]
    steps: tuple[float, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSteps:
    """Seconds of each phase by step, including ``STEP``."""

    source: str
    steps: tuple[int, ...]
    phases: dict[str, tuple[float, ...]]


def compare(predicted: TimedSteps, measured: TimedSteps) -> Comparison:
    """Compare two tables of the same steps. Raises ``TraceError`` if one lacks steps, if a time
    is negative or unknown, or if a step was measured as 0 s."""
    for one, other in ((predicted, measured), (measured, predicted)):
        if lacking := sorted(set(other.steps) - set(one.steps)):
            raise TraceError(f"{one.source} lacks steps {_named(lacking)} of {other.source}")
    both = {
        name: _accuracies(name, predicted.phases[name], seconds, measured.steps)
        for name, seconds in measured.phases.items()
        if name in predicted.phases
    }
    found = {name: each for name, each in both.items() if np.isfinite(each).all()}
    whole = found.pop(STEP)
    sums = [sum(side.phases[STEP]) for side in (predicted, measured)]
    return Comparison(
        accuracy_mean=float(whole.mean()),
        accuracy_worst=float(whole.min()),
        phases={
            name: Accuracy(mean=float(each.mean()), worst=float(each.min()))
            for name, each in found.items()
        },
        instant=tuple(sorted(both.keys() - found.keys() - {STEP})),
        steps=tuple(whole.tolist()),
        total=1.0 - abs(sums[0] - sums[1]) / sums[1],
    )


def _accuracies(
    name: str, given: Sequence[float], seen: Sequence[float], steps: Sequence[int]
) -> NDArray[np.float64]:
    predicted, measured = np.asarray(given, np.float64), np.asarray(seen, np.float64)
    least = measured > 0.0 if name == STEP else measured >= 0.0
    bad = ~(np.isfinite(predicted) & np.isfinite(measured) & least)
    if bad.any():
        place = int(np.flatnonzero(bad)[0])
        raise TraceError(
            f"step {steps[place]}: {name} measured as {measured[place]:g} s and predicted as"
            f" {predicted[place]:g} s has no accuracy"
        )
    same = predicted == measured
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(same, 1.0, 1.0 - np.abs(predicted - measured) / measured)


def _named(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - _SHOWN} more" if len(steps) > _SHOWN else ""
    return ", ".join(str(step) for step in steps[:_SHOWN]) + more


def read_timed(path: Path) -> TimedSteps:
    """Read a run folder, a ``metrics.jsonl``, JSON lines of one step each, or a JSON object.

    A line holds metrics (``step_time``, ``timing_s/rollout``, ``timing_s/train``) or seconds
    (``step_s``, ``rollout_s``, ...) and its number as ``step``. A JSON object holds lists of
    seconds by the latter names, and the numbers as ``steps`` (default: from 0). If a step comes
    twice, as after a resume, the last one counts. Raises ``TraceError``.
    """
    file = path / "metrics.jsonl" if path.is_dir() else path
    if not file.is_file():
        hint = f" (is this a run folder? {_TRACES})" if path.is_dir() else ""
        raise TraceError(f"{file}: no such file{hint}")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TraceError(f"{file}: not text, expected JSON or JSON lines ({_TRACES})") from None
    rows = _from_lists(file, text) if file.suffix == ".json" else _from_lines(file, text)
    return _table(file, rows)


def _table(file: Path, rows: dict[int, dict[str, float]]) -> TimedSteps:
    if not rows:
        raise TraceError(f"{file}: no steps in it")
    steps = sorted(rows)
    if not any(STEP in row for row in rows.values()):
        raise TraceError(f"{file}: no step_time or step_s in any line ({_TRACES})")
    names = list(dict.fromkeys(name for step in steps for name in rows[step]))
    for name in names:
        if lacking := [step for step in steps if name not in rows[step]]:
            raise TraceError(f"{file}: no {name} in steps {_named(lacking)}")
    phases = {name: tuple(rows[step][name] for step in steps) for name in names}
    return TimedSteps(source=str(file), steps=tuple(steps), phases=phases)


def _from_lines(file: Path, text: str) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.strip():
            continue
        try:
            found: object = json.loads(line)
        except ValueError:
            # A crash may tear the last line.
            if not line.endswith("\n"):
                break
            raise TraceError(f"{file}, line {number}: not JSON") from None
        if not isinstance(found, dict):
            raise TraceError(f"{file}, line {number}: expected an object")
        row = cast(dict[str, Any], found)
        step = row.get("step", len(rows))
        if type(step) is not int:
            raise TraceError(f"{file}, line {number}: step: expected a whole number, got {step!r}")
        rows[step] = {
            name: float(value)
            for key, value in row.items()
            if (name := _phase(key)) is not None and _is_number(value)
        }
    return rows


def _from_lists(file: Path, text: str) -> dict[int, dict[str, float]]:
    try:
        found: object = json.loads(text)
    except ValueError:
        raise TraceError(f"{file}: not JSON (JSON lines are named *.jsonl)") from None
    if not isinstance(found, dict):
        raise TraceError(f"{file}: expected an object with a list step_s")
    data = cast(dict[str, Any], found)
    nested = data.get("phases")
    inner = cast(dict[str, Any], nested) if isinstance(nested, dict) else {}
    lists = {
        **{_phase(f"{key.removesuffix('_s')}_s"): value for key, value in inner.items()},
        **{_phase(key): value for key, value in data.items()},
    }
    columns = {
        name: cast(list[Any], value)
        for name, value in lists.items()
        if name and isinstance(value, list)
    }
    if STEP not in columns:
        raise TraceError(f"{file}: no list step_s in it")
    return _rows(file, data.get("steps"), columns)


def _rows(file: Path, steps: object, columns: dict[str, list[Any]]) -> dict[int, dict[str, float]]:
    count = len(columns[STEP])
    given = cast(list[Any], steps) if isinstance(steps, list) else list(range(count))
    for name, values in {"steps": given, **columns}.items():
        if len(values) != count:
            raise TraceError(f"{file}: {name} has {len(values)} entries, step_s has {count}")
        if not all(_is_number(value) for value in values):
            raise TraceError(f"{file}: {name}: expected numbers only")
    names = list(columns)
    return {
        int(step): dict(zip(names, map(float, row), strict=True))
        for step, *row in zip(given, *columns.values(), strict=True)
    }


def _phase(key: str) -> str | None:
    if key in _PHASES:
        return _PHASES[key]
    known = key.endswith("_s") and "/" not in key and not key.startswith(("mean_", "wall"))
    return key.removesuffix("_s") if known else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
