"""Where metrics go besides ``metrics.jsonl``: TensorBoard, and trackers through accelerate."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollpacker.config.reading.secrets import masked
from rollpacker.durable import AppendFile

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

_PROJECT = "rollpacker"
_HINTS = {
    "wandb": "run 'wandb login', or set WANDB_MODE=offline",
    "mlflow": "point MLFLOW_TRACKING_URI to a server, a database or a folder that can be written",
    "trackio": "let its folder (TRACKIO_DIR) be one that can be written",
}


class Tracker(Protocol):
    """Takes the numbers of each step."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record one step."""
        ...

    def close(self) -> None:
        """Hand everything over and stop."""
        ...


class TensorBoard:
    """A TensorBoard event file, written without torch or TensorFlow and without a thread.

    Args:
        folder: log directory; made if missing.
        first_step: points of this and later steps, left by a crash, are hidden.

    Raises:
        ValueError: the tensorboard package is missing.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        _require("tensorboard")
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        self._file = AppendFile(folder / f"events.out.tfevents.{now:.6f}.{os.getpid()}")
        self._records = RecordWriter(self._file)
        self._write(wall_time=now, file_version="brain.Event:2")
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(wall_time=now, step=first_step, session_log=start)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one event with every number of the step. Raises ``OSError``."""
        summary = self._summary.Summary()
        for tag, number in numbers.items():
            summary.value.add(tag=tag, simple_value=number)
        self._write(wall_time=time.time(), step=step, summary=summary)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event.Event(**fields).SerializeToString())


class AccelerateTracker:
    """wandb, trackio or mlflow, through accelerate's class for it."""

    def __init__(self, tracker: GeneralTracker, config: Mapping[str, Any]) -> None:
        self._tracker = tracker
        tracker.start()
        tracker.store_init_configuration(_flat(masked(config)))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Send one step."""
        self._tracker.log(dict(numbers), step=step)

    def close(self) -> None:
        """Finish the tracker's run."""
        self._tracker.finish()


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Start the trackers of ``RunConfig.trackers``; the run is named after its folder.

    Args:
        names: among ``wandb``, ``trackio`` and ``mlflow``.
        folder: the run's folder.
        config: the resolved configuration as a plain tree.

    Raises:
        ValueError: a package is missing, or a tracker does not start; the message says what to do.
    """
    _require("tensorboard")
    if not names:
        return []
    for name in (*names, "accelerate"):
        _require(name)
    from accelerate import PartialState
    from accelerate.tracking import MLflowTracker, TrackioTracker, WandBTracker

    PartialState(cpu=True)
    name = folder.resolve().name
    build = {
        "wandb": lambda: WandBTracker(_PROJECT, name=name, dir=str(folder)),
        "trackio": lambda: TrackioTracker(_PROJECT, name=name),
        "mlflow": lambda: MLflowTracker(_PROJECT, run_name=name),
    }
    opened: list[Tracker] = []
    for key in names:
        try:
            opened.append(AccelerateTracker(build[key](), config))
        except Exception as error:  # third parties raise anything
            for tracker in opened:
                tracker.close()
            raise ValueError(
                f"trackers: {key} does not start ({_first_line(error)}); {_HINTS[key]}, or take it "
                "out of 'trackers'"
            ) from error
    return opened


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(lines[0].split())[:200]


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ValueError(
            f"metrics need the package {package}, which is missing: run 'pip install {package}'"
            " (see 'trackers')"
        )


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
