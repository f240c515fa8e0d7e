"""The files that a run writes: metrics, samples, worker times, the journal."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rollpacker.config import RunConfig
from rollpacker.config.reading import masked
from rollpacker.core.journal import JournalWriter
from rollpacker.core.types import Group, ReplicaId
from rollpacker.durable import AppendFile, cut_jsonl, replace_file
from rollpacker.errors import first_line
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.rounds.tail_batching import NO_VARIANCE
from rollpacker.runtime.cluster.devices import worker_devices
from rollpacker.runtime.record.metrics import (
    AgreementAlarm,
    Metrics,
    StepWarnings,
    encoded,
    environment_metrics,
    logged_metrics,
    numbers,
    program_metrics,
    staleness_metrics,
    step_metrics,
    without_learning,
    without_program,
)
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.record.samples import SampleLog, Texts
from rollpacker.runtime.step.step import StepRecord

_PROJECT = "rollpacker"
_HINTS = {
    "wandb": "run 'wandb login', or set WANDB_MODE=offline",
    "mlflow": "point MLFLOW_TRACKING_URI to a server, a database or a folder that can be written",
    "trackio": "let its folder (TRACKIO_DIR) be one that can be written",
}
_LONGEST = 500
"""The most characters of a configured value that mlflow takes."""


class Tracker(NamedTuple):
    """Takes the numbers of each step: ``log(numbers, step=...)``. ``close()`` finishes."""

    name: str
    log: Callable[..., Any]
    close: Callable[[], Any]


def open_trackers(names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Start the trackers of ``RunConfig.trackers``. The tracked run has the folder's name.

    Args:
        names: among ``wandb``, ``trackio`` and ``mlflow``.

    Raises:
        ValueError: a package is missing, or a tracker does not start. The message has the fix.
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
                f"trackers: {name} does not start ({reason}): {_HINTS[name]}, or remove it "
                "from 'trackers'"
            ) from error
    return opened


def tensorboard(folder: Path, first_step: int) -> Tracker:
    """Event files in a folder. Points of ``first_step`` and later, left by a crash, are hidden."""
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
    result: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            result |= _flat(value, f"{prefix}{key}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            result[prefix + key] = value if plain else str(value)
    return result


_FAULTS = 10
"""The most faults of one step that are logged one by one."""


_OURS: dict[str, Any] = {
    **dict.fromkeys(("output", "seed", "deterministic", "engine", "rewards", "rollout"), True),
    "model": {"path": True, "dtype": True},
    "data": {"path": True, "shuffle": True},
}
"""The parts of a configuration that a host's trainer does not decide."""


def save_config(config: RunConfig, folder: Path, *, hosted: bool = False) -> None:
    """Write the resolved configuration. If ``hosted``, leave out the host's part."""
    data = config.model_dump(mode="json", include=_OURS if hosted else None)
    head = "# The host's trainer has its own arguments.\n" if hosted else ""
    text = head + yaml.safe_dump(data, sort_keys=False)
    replace_file(folder / "config.yaml", text.encode(), mode=0o600)


class RunLog:
    """The run's files and its view on the terminal.

    Args:
        last_step: rows of later steps are dropped. -1 starts anew.
        max_length: longest response, tokens.
        context: the model's, tokens, if it limits responses.
        trackers: get the metrics too. They are closed with the log.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        last_step: int,
        max_length: int,
        context: int | None = None,
        progress: Progress,
        texts: Texts,
        trackers: Sequence[Tracker],
    ) -> None:
        self.progress = progress
        self._folder = folder
        self._journal_failed = False
        self.journal = JournalWriter(folder / "journal.jsonl", self._miss_journal)
        # At most one step's rows wait for it, so a slow disk slows the run.
        self._writer = ThreadPoolExecutor(1, "samples")
        self._written: Future[None] = self._writer.submit(lambda: None)
        self._programs = any(reward.runs_programs for reward in config.rewards)
        self._samples = SampleLog(
            folder, config, last_step=last_step, texts=texts, say=progress.note
        )
        self._metrics = MetricsLog(
            folder, last_step=last_step, trackers=trackers, say=progress.note
        )
        cut_jsonl(folder / "workers.jsonl", last_step)
        self._tasks = AppendFile(folder / "workers.jsonl")
        self._emulated = config.devices.emulate is not None
        self.warnings = StepWarnings(max_length, context)
        self._agreement = AgreementAlarm.of(config)
        self._rollout = config.rollout
        self._clashes: set[str] = set()

    async def step(
        self,
        record: StepRecord,
        groups: Sequence[Group],
        *,
        policy: RolloutPolicy,
        num_tokens: int,
        epoch: float,
        extra: Metrics,
    ) -> Metrics:
        """Write an ended step to every file, and return its metrics.

        Its rows are written while the run goes on. Their errors are raised at the next step.

        Args:
            groups: that were trained on.
            policy: reports the bias of lengths, and warns.
            num_tokens: prompt and response tokens trained on since the run began.
            epoch: passes over the data so far, with the fraction.
            extra: metrics of an evaluation.
        """
        bias = policy.bias()
        for alarm in bias.alarms:
            self.progress.note(f"WARNING step {record.step}: {alarm}")
        await asyncio.wrap_future(self._written)
        measuring = self._writer.submit(
            self._measure,
            record,
            groups,
            epoch=epoch,
            num_tokens=num_tokens,
            queue=policy.queue,
            bias=bias,
        )
        measured, lines = await asyncio.wrap_future(measuring)
        metrics = without_learning(measured) if self._emulated else measured
        metrics = metrics | extra
        metrics |= self._logged(record, metrics, lines)
        for line in lines:
            self.progress.note(line)
        self._written = self._writer.submit(self._add_rows, record, groups)
        self._metrics.write(metrics)
        self.progress.step(metrics)
        self.journal.flush()
        return metrics

    def _measure(
        self, record: StepRecord, groups: Sequence[Group], *, epoch: float, **of_run: Any
    ) -> tuple[Metrics, list[str]]:
        metrics = step_metrics(record, groups, epoch=epoch, **of_run)
        every = record.attempts.values() if self._programs else ()
        graded = [a for a in every if not a.stale or a.stale < a.tokens]  # in this step
        metrics |= program_metrics(graded) | environment_metrics(record.kept)
        if self._rollout.tail_batching.carries:
            metrics |= staleness_metrics(record.kept, record.step)
        lines = self.warnings.check(record.step, groups, without_program(graded))
        if self._agreement is not None and (line := self._agreement.check(metrics)):
            lines.append(line)
        if self._rollout.dynamic_sampling.enabled:
            filtered, wanted = record.filtered(), self._rollout.prompts_per_step
            equal = sum(reason == NO_VARIANCE for reason in record.dropped.values())
            mean = filtered.get("dropped_reward", math.nan)
            trained, used_up = len(record.trained), epoch.is_integer()
            lines += self.warnings.unfilled(record.step, trained, wanted, equal, mean, used_up)
            metrics |= {f"dynamic_sampling/{name}": value for name, value in filtered.items()}
        return metrics, [*lines, *(f"step {record.step}: {line}" for line in _troubles(record))]

    def _logged(self, record: StepRecord, metrics: Metrics, lines: list[str]) -> Metrics:
        """Metrics of reward functions whose names are not the run's own."""
        logged = logged_metrics(record.kept)
        for name in sorted((logged.keys() & metrics.keys()) - self._clashes):
            self._clashes.add(name)
            lines.append(
                f"WARNING a reward function logs the metric '{name}', a name of the run's own. "
                "Its values are left out. Give it another name."
            )
        return {name: value for name, value in logged.items() if name not in metrics}

    def _add_rows(self, record: StepRecord, groups: Sequence[Group]) -> None:
        self._add_tasks(record)
        self._samples.add(record, groups)

    def _add_tasks(self, record: StepRecord) -> None:
        lines = [
            json.dumps(
                {
                    "step": task.step,
                    "worker": worker,
                    "prompts": len(task.prompts),
                    "start_s": round(task.start_s, 6),
                    "end_s": round(task.end_s, 6),
                    "kind": task.kind,
                    **role,
                }
            )
            for task in record.tasks
            for worker, role in _places(record.fleet, task.replica)
        ]
        try:
            self._tasks.write("".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self.progress.note(f"workers.jsonl cannot be written ({error}), but the run goes on")

    def _miss_journal(self, error: OSError) -> None:
        if not self._journal_failed:
            self._journal_failed = True
            self.progress.note(
                f"WARNING {self._folder / 'journal.jsonl'} cannot be written ({error.strerror}): "
                "decisions may be missing from it, but the run goes on"
            )

    def sum_up(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``. A full disk must not hide the reason of the run's end."""
        data = json.dumps(summary, indent=1).encode()
        with contextlib.suppress(OSError):
            replace_file(self._folder / "summary.json", data)

    def flush(self) -> None:
        self._written.result()
        self._writer.submit(self._samples.flush).result()
        self.journal.flush()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for part in (self.journal, self._tasks, self._metrics):
                stack.callback(part.close)
            stack.callback(self._samples.flush)
            self._writer.shutdown()
            self._written.result()


def _places(fleet: Fleet, replica: ReplicaId) -> list[tuple[int, dict[str, Any]]]:
    """Worker numbers for a replica's task, each with more fields of its line. A colocated replica
    has its engines' numbers, or its own if none is left. A separate one shares its number with an
    engine elsewhere, so its line has its role and sizes."""
    if fleet.layout == "colocated":
        return [(worker, {}) for worker in fleet.beside.get(replica) or (replica,)]
    devices = len(fleet.replicas.get(replica, ()))
    return [(replica, {"role": "replica", "devices": devices, "engine_devices": fleet.tp})]


def _troubles(record: StepRecord) -> list[str]:
    faults = record.faults[:_FAULTS]
    if len(record.faults) > _FAULTS:
        faults.append(f"and {len(record.faults) - _FAULTS} more faults")
    lost = [p for p, reason in record.dropped.items() if reason != NO_VARIANCE]
    return [*faults, *(f"prompt {p} is dropped: {record.dropped[p]}" for p in lost)]


class MetricsLog:
    """``metrics.jsonl``, TensorBoard and the trackers. A full disk or a tracker never stops a run.

    Args:
        last_step: lines of later steps, left by a crash, are dropped. -1 drops all.
        say: gets one line for each target that fails.
    """

    def __init__(
        self,
        folder: Path,
        *,
        last_step: int = -1,
        trackers: Sequence[Tracker] = (),
        say: Callable[[str], None],
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"
        cut_jsonl(self._path, last_step)
        self._file = AppendFile(self._path)
        self._say = say
        self._failing: set[str] = set()
        self._trackers = [tensorboard(folder / "tensorboard", last_step + 1), *trackers]

    def write(self, metrics: Metrics) -> None:
        self._try(str(self._path), self._file.write, encoded(metrics))
        shown = numbers(metrics)
        step = int(shown.pop("step"))
        for tracker in self._trackers:
            self._try(tracker.name, tracker.log, shown, step=step)

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            self._try(tracker.name, tracker.close)

    def _try(self, target: str, act: Callable[..., Any], *args: Any, **named: Any) -> None:
        try:
            act(*args, **named)
        except Exception as error:  # third-party trackers raise anything
            if target not in self._failing:
                self._say(f"{target}: metrics cannot be written ({error}), but the run goes on")
            self._failing.add(target)


def cores(config: RunConfig) -> dict[str, int]:
    """Cores that a run on a CPU may use, and those of its workers. Empty on GPUs."""
    places = [device for device, _ in worker_devices(config)]
    if places[0] != "cpu":
        return {}
    pins = hasattr(os, "sched_getaffinity")
    usable = len(os.sched_getaffinity(0)) if pins else os.cpu_count() or 1
    return {"all": usable, "workers": len(places) * config.devices.threads}
