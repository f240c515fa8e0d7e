"""Where metrics go besides ``metrics.jsonl``: TensorBoard, wandb, trackio, mlflow."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rollpacker.config.reading.secrets import masked
from rollpacker.errors import first_line

_PROJECT = "rollpacker"
_HINTS = {
    "wandb": "run 'wandb login', or set WANDB_MODE=offline",
    "mlflow": "point MLFLOW_TRACKING_URI to a server, a database or a folder that can be written",
    "trackio": "let its folder (TRACKIO_DIR) be one that can be written",
}
_LONGEST = 500
"""Characters of a configured value: mlflow takes no more."""


class Tracker(NamedTuple):
    """Takes the numbers of each step: ``log(numbers, step=...)``; ``close()`` hands them over."""

    name: str
    log: Callable[..., Any]
    close: Callable[[], Any]


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Start the trackers of ``RunConfig.trackers``; the run is named after its folder.

    Args:
        names: among ``wandb``, ``trackio`` and ``mlflow``.
        folder: the run's folder.
        config: the resolved configuration as a plain tree.

    Raises:
        ValueError: a package is missing, or a tracker does not start; the message says what to do.
    """
    for name in ("tensorboard", *names):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"metrics need the package {name}, which is missing: run 'pip install {name}'"
                " (see 'trackers')"
            )
    opened: list[Tracker] = []
    for name in names:
        try:
            opened.append(_tracker(name, folder, _flat(masked(config))))
        except Exception as error:  # third parties raise anything
            for tracker in opened:
                tracker.close()
            reason = " ".join(first_line(error).split())[:200]
            raise ValueError(
                f"trackers: {name} does not start ({reason}); {_HINTS[name]}, or take it "
                "out of 'trackers'"
            ) from error
    return opened


def tensorboard(folder: Path, first_step: int) -> Tracker:
    """Event files in a folder; points of ``first_step`` and later, left by a crash, are hidden."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=5)

    def log(numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            writer.add_scalar(name, number, step)

    return Tracker("TensorBoard", log, writer.close)


def _tracker(name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    module: Any = importlib.import_module(name)
    run = folder.resolve().name
    if name == "mlflow":
        module.set_experiment(_PROJECT)
        module.start_run(run_name=run)
        module.log_params({key: str(value)[:_LONGEST] for key, value in config.items()})
        return Tracker(name, module.log_metrics, module.end_run)
    more = {"dir": str(folder)} if name == "wandb" else {}
    module.init(project=_PROJECT, name=run, config=dict(config), **more)
    return Tracker(name, module.log, module.finish)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as dotted keys with plain values."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            result[prefix + key] = value if plain else str(value)
    return result
