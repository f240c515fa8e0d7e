"""Models that grade: what the processes of judges and reward models hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollpacker.config import RewardConfig, RunConfig
from rollpacker.sim.costs.models import ModelShape, find_model

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
_STREAMED = 3
"""Layers of a judge that are on a GPU at least: one that stays, two that come and go."""

Held = list[tuple[str, float]]
"""Names and bytes."""


def graders(config: RunConfig, *, cuda: bool) -> tuple[Held, Held]:
    """On the first GPU, and in the machine's own memory; each grading process has all of them.

    A judge on a GPU streams its layers from the machine's memory: what it takes at least is
    counted, and 0 where its size is not known.
    """
    device: Held = []
    host: Held = []
    for reward in config.rewards:
        found = _model(reward)
        if found is None:
            continue
        name, size, on_cuda = found
        try:
            shape = find_model(name)
        except ValueError:
            host.append((f"{name} (size not known)", 0.0))
            continue
        workers = config.grading.workers
        label = f"{workers} x {name}" if workers > 1 else name
        host.append((label, workers * size * shape.parameters))
        if cuda and on_cuda:
            device.append((label, workers * size * _resident(shape)))
    return device, host


def _model(reward: RewardConfig) -> tuple[str, int, bool] | None:
    """Which model grades, bytes of a weight, and whether it may be on a GPU."""
    options: dict[str, Any] = reward.options
    if reward.function == "judge":
        if not options.get("model"):
            return None
        size = _SIZES.get(str(options.get("dtype", "auto")), 4)
        return str(options["model"]), size, options.get("device", "auto") != "cpu"
    folder = Path(reward.function).expanduser()
    if ":" in reward.function or not (folder / "config.json").is_file():
        return None
    size = _SIZES.get(str(options.get("dtype", "float32")), 4)
    return str(folder), size, str(options.get("device", "cpu")).startswith("cuda")


def _resident(shape: ModelShape) -> int:
    """Weights that are on the device at least."""
    return shape.ends + min(shape.layers, _STREAMED) * shape.largest_layer
