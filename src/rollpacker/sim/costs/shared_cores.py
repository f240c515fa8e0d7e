"""The cores of a machine on which workers, driver and grading take turns: what no mode can beat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCores:
    """What a run on a CPU computed, where its workers had all cores. CPU seconds.

    Args:
        cores: of the machine.
        token_s: of engines, for each token decoded.
        step_s: of each step beside that: gradients, updates and the driver; grading is not counted.
    """

    cores: int
    token_s: float
    step_s: float

    def least_s(self, decoded: float) -> float:
        """Wall seconds of a step that decodes so many tokens and leaves no core idle."""
        return (decoded * self.token_s + self.step_s) / self.cores


def read_shared_cores(folder: Path) -> SharedCores | None:
    """Of a run's folder; None where the driver had cores of its own, or where nothing says so."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    cores = cast(dict[str, Any], summary).get("cores")
    if not cores or cores["workers"] < cores["all"] or not summary["decoded_tokens"]:
        return None
    return _shared(cores["all"], summary)


def _shared(cores: int, summary: Mapping[str, Any]) -> SharedCores:
    seconds, steps = summary["timing_s"], summary["steps"]
    decoding = seconds["decode_cpu"]
    return SharedCores(
        cores=cores,
        token_s=decoding / summary["decoded_tokens"],
        step_s=(seconds["worker_cpu"] - decoding + seconds["driver_cpu"]) / steps,
    )
