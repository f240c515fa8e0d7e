"""The learning rate of a run whose configuration names none."""

from __future__ import annotations

from rollpacker.config import RunConfig
from rollpacker.job.plan.model_size import count_model
from rollpacker.runtime.record.checkpoint import VerifiedCheckpoint
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.state.schedule import default_learning_rate


def with_learning_rate(
    config: RunConfig, found: VerifiedCheckpoint | None, progress: Progress
) -> RunConfig:
    """``config`` with ``train.learning_rate``: as given, as in the checkpoint to go on from, or by
    all weights of the model. Raises ``ValueError`` when there is no such model."""
    if config.train.learning_rate is not None:
        return config
    if found is not None:
        rate = found.state["config"]["train"]["learning_rate"]
    else:
        count = count_model(config.model.path)
        lora = config.model.lora_rank > 0
        rate = default_learning_rate(count.total, lora=lora)
        if config.devices.emulate is None:  # else nothing is trained
            progress.note(
                f"train.learning_rate: {rate:g}, for {count.words}{' with LoRA' if lora else ''}"
            )
    train = config.train.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"train": train})
