"""The learning rate of a run whose configuration names none."""

from __future__ import annotations

from rollpacker.config import RunConfig
from rollpacker.runtime.record.checkpoint import VerifiedCheckpoint
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.costs.models import ModelShape
from rollpacker.train.model.loading import source
from rollpacker.train.state.schedule import default_learning_rate


def with_learning_rate(
    config: RunConfig, found: VerifiedCheckpoint | None, progress: Progress
) -> RunConfig:
    """``config`` with ``train.learning_rate``: as given, as in the checkpoint to go on from, or by
    the size of the model. Raises ``ValueError`` when there is no such model."""
    if config.train.learning_rate is not None:
        return config
    if found is not None:
        rate = found.state["config"]["train"]["learning_rate"]
    else:
        shape = model_shape(config.model.path)
        lora = config.model.lora_rank > 0
        rate = default_learning_rate(shape.parameters, lora=lora)
        if config.devices.emulate is None:  # else nothing is trained
            progress.note(
                f"train.learning_rate: {rate:g}, for {short_count(shape.parameters)} parameters"
                f"{' with LoRA' if lora else ''}"
            )
    train = config.train.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"train": train})


def model_shape(path: str) -> ModelShape:
    """Of a folder or hub name. Raises ``ValueError``."""
    _, config = source(path)
    return ModelShape.from_config(config.to_dict(), path)


def short_count(count: int) -> str:
    """Three digits and a unit, such as ``7.62B``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
