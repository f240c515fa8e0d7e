"""Everything that a run writes while it runs: metrics, samples, worker times, the journal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from rollpacker.config import RunConfig
from rollpacker.core.journal import JournalWriter
from rollpacker.core.types import Group, ReplicaId
from rollpacker.durable import AppendFile, cut_jsonl, replace_file
from rollpacker.policy.engines.fleet import Fleet
from rollpacker.policy.rounds.tail_batching import NO_VARIANCE
from rollpacker.reward.functions import reward_names
from rollpacker.runtime.attempts import environment_reward
from rollpacker.runtime.attempts.detokenizer import Texts
from rollpacker.runtime.attempts.environment_metrics import environment_metrics
from rollpacker.runtime.attempts.programs import program_metrics, without_program
from rollpacker.runtime.record.agreement import AgreementAlarm
from rollpacker.runtime.record.metrics import (
    Metrics,
    MetricsLog,
    StepWarnings,
    TailMetrics,
    staleness_metrics,
    step_metrics,
    without_learning,
)
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.record.samples import SampleLog, SampleRow
from rollpacker.runtime.record.trackers import Tracker
from rollpacker.runtime.step.grading import logged_metrics
from rollpacker.runtime.step.step import StepRecord

_FAULTS = 10
"""Faults of one step that are said one by one."""


_OURS: dict[str, Any] = {
    **dict.fromkeys(("output", "seed", "deterministic", "engine", "rewards", "rollout"), True),
    "model": {"path": True, "dtype": True},
    "data": {"path": True, "shuffle": True},
}
"""What of a configuration is ours where somebody else's trainer trains."""


def save_config(config: RunConfig, folder: Path, *, hosted: bool = False) -> None:
    """Write the resolved configuration; ``hosted``: without what the host decides."""
    data = config.model_dump(mode="json", include=_OURS if hosted else None)
    head = "# The host's trainer has its own arguments.\n" if hosted else ""
    text = head + yaml.safe_dump(data, sort_keys=False)
    replace_file(folder / "config.yaml", text.encode(), mode=0o600)


class RunLog:
    """The run's files and its view on the terminal.

    Args:
        folder: the run's.
        config: the run's.
        last_step: what was written for later steps is dropped; -1 starts anew.
        max_length: longest response, tokens.
        context: the model's, tokens, where it is what limits responses.
        progress: the view.
        texts: of prompts and responses.
        trackers: get the metrics too; closed with the log.
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
        # One step's rows at most wait for it: a disk that is too slow slows the run.
        self._writer = ThreadPoolExecutor(1, "samples")
        self._written: Future[None] = self._writer.submit(lambda: None)
        self._programs = any(reward.runs_programs for reward in config.rewards)
        self._texts, self._kept = texts, config.samples
        self._samples = SampleLog(
            folder,
            config.samples,
            last_step=last_step,
            say=progress.note,
            rewards=_reward_names(config),
            programs=self._programs,
            turns=config.environment is not None,
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
        epoch: float,
        tail: TailMetrics,
        num_tokens: int,
        extra: Metrics,
    ) -> Metrics:
        """Write one step to every file; returns its metrics. Nothing else waits for it.

        Its rows are written meanwhile: what is wrong with them is raised at the next step.
        """
        await asyncio.wrap_future(self._written)
        measuring = self._writer.submit(
            self._measure, record, groups, epoch=epoch, tail=tail, num_tokens=num_tokens
        )
        measured, lines = await asyncio.wrap_future(measuring)
        metrics = without_learning(measured) if self._emulated else measured
        metrics = metrics | extra
        logged = logged_metrics(record.kept)
        for name in sorted((logged.keys() & metrics.keys()) - self._clashes):
            self._clashes.add(name)
            lines.append(
                f"WARNING a reward function logs the metric '{name}', which is one of the run's: "
                "what it logs is left out; give it another name"
            )
        metrics |= {name: value for name, value in logged.items() if name not in metrics}
        for line in lines:
            self.progress.note(line)
        self._written = self._writer.submit(self._add_rows, record, groups)
        self._metrics.write(metrics)
        self.progress.step(metrics)
        self.journal.flush()
        return metrics

    def _measure(
        self, record: StepRecord, groups: Sequence[Group], **of_run: Any
    ) -> tuple[Metrics, list[str]]:
        """A step's metrics, and what is to be said of it."""
        metrics = step_metrics(
            step=record.step,
            groups=groups,
            updates=record.updates,
            step_time=record.end_s - record.start_s,
            timing_s=record.timing_s(),
            bubble=record.bubble(),
            **of_run,
        )
        metrics["grading/resampled"] = record.resampled()
        every = record.attempts.values() if self._programs else ()
        graded = [a for a in every if not a.stale or a.stale < a.tokens]  # the others were before
        metrics |= program_metrics(graded)
        metrics |= environment_metrics(record.kept)
        if self._rollout.tail_batching.carries:
            metrics |= staleness_metrics(record.kept, record.step)
        metrics |= {f"engine/{name}": value for name, value in record.engine().items()}
        metrics |= {f"speculation/{name}": value for name, value in record.drafts().items()}
        metrics["start_s"] = record.start_s
        lines = self.warnings.check(record.step, groups, without_program(graded))
        if self._agreement is not None and (line := self._agreement.check(metrics)):
            lines.append(line)
        if self._rollout.dynamic_sampling.enabled:
            metrics |= self._filtered(record, lines, float(metrics["epoch"]))
        return metrics, [*lines, *(f"step {record.step}: {line}" for line in _troubles(record))]

    def _filtered(self, record: StepRecord, lines: list[str], epoch: float) -> Metrics:
        """Metrics of dynamic sampling; what is to be said of it goes to ``lines``."""
        filtered, wanted = record.filtered(), self._rollout.prompts_per_step
        equal = sum(reason == NO_VARIANCE for reason in record.dropped.values())
        mean = filtered.get("dropped_reward", math.nan)
        trained, used_up = len(record.trained), epoch.is_integer()
        lines += self.warnings.unfilled(record.step, trained, wanted, equal, mean, used_up)
        return {f"dynamic_sampling/{name}": value for name, value in filtered.items()}

    def _add_rows(self, record: StepRecord, groups: Sequence[Group]) -> None:
        self._add_tasks(record)
        self._add_samples(record, groups)

    def _add_samples(self, record: StepRecord, groups: Sequence[Group]) -> None:
        advantages = {
            sample.attempt: float(advantage)
            for group in groups
            for sample, advantage in zip(group.samples, group.advantages, strict=True)
        }
        self._texts.begin()
        for attempt in record.attempts.values():
            output, learning = attempt.output, not self._emulated
            end_s = record.end_s if attempt.end_s is None else attempt.end_s
            row = SampleRow(
                prompt=attempt.prompt,
                attempt=attempt.id,
                sample_index=attempt.index,
                step=record.step,
                round_kind=record.kind,
                worker=attempt.engine,
                weights_version=attempt.oldest(record.step),
                stale_tokens=attempt.stale,
                prompt_tokens=len(attempt.prompt_tokens),
                tokens=attempt.tokens,
                finish_reason=None if output is None else output.finish_reason,
                state=attempt.verdict,
                start_s=attempt.start_s,
                end_s=end_s,
                reward=attempt.reward if learning else None,
                grade_s=None if attempt.graded_s is None else attempt.graded_s - end_s,
                advantage=advantages.get(attempt.id) if learning else None,
                rewards=attempt.rewards if learning else {},
                extra=attempt.extra,
                prompt_text=self._texts.prompt(attempt) if self._kept.texts else None,
                completion=self._texts.completion(attempt) if self._kept.texts else None,
                answer=self._texts.answer(attempt) if self._kept.texts else None,
                completion_ids=None if output is None else output.tokens,
                program=next(iter(attempt.runs.values()), None),
                conversation=attempt.conversation,
            )
            self._samples.add(row)
        self._samples.end_step()

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
            self.progress.note(f"workers.jsonl cannot be written ({error}); the run goes on")

    def _miss_journal(self, error: OSError) -> None:
        if not self._journal_failed:
            self._journal_failed = True
            self.progress.note(
                f"WARNING {self._folder / 'journal.jsonl'} cannot be written ({error.strerror}): "
                "decisions may be missing from it; the run goes on"
            )

    def flush(self) -> None:
        """Before a checkpoint: nothing that it counts on may be in memory only."""
        self._written.result()
        self._writer.submit(self._samples.flush).result()
        self.journal.flush()

    def close(self) -> None:
        """Close every file; the samples' parts are merged."""
        with contextlib.ExitStack() as stack:
            for part in (self.journal, self._tasks, self._metrics, self._samples):
                stack.callback(part.close)
            self._writer.shutdown()
            self._written.result()


def _reward_names(config: RunConfig) -> list[str]:
    own = [] if config.environment is None else [environment_reward.NAME]
    return [*reward_names(config.rewards), *own]


def _places(fleet: Fleet, replica: ReplicaId) -> list[tuple[int, dict[str, Any]]]:
    """Numbers under which a replica's task is written, and what is written with each.

    A colocated replica has those of the engines on its devices, its own where none is left. One
    that is separate shares its number with an engine elsewhere: its line says what it is, and how
    many devices it has and an engine has.
    """
    if fleet.layout == "colocated":
        return [(worker, {}) for worker in fleet.beside.get(replica) or (replica,)]
    devices = len(fleet.replicas.get(replica, ()))
    return [(replica, {"role": "replica", "devices": devices, "engine_devices": fleet.tp})]


def _troubles(record: StepRecord) -> list[str]:
    """What went wrong, and every prompt that was lost by it."""
    faults = record.faults[:_FAULTS]
    if len(record.faults) > _FAULTS:
        faults.append(f"and {len(record.faults) - _FAULTS} more faults")
    lost = [p for p, reason in record.dropped.items() if reason != NO_VARIANCE]
    return [*faults, *(f"prompt {p} is dropped: {record.dropped[p]}" for p in lost)]
