"""One RL job from configuration to trained model; reads like a table of contents.

Every step: all workers hold the weights of the step; a round of rollouts is sampled, graded and
summed into gradients as groups finish; one update ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.job.breaker import Breaker
from rollpacker.job.build import Parts, build, total_steps
from rollpacker.job.learning_rate import with_learning_rate
from rollpacker.job.resume import Start, choose_start
from rollpacker.report.run_folder import ReportError
from rollpacker.runtime import messages as msg
from rollpacker.runtime.checkpoint import CheckpointError, Checkpoints
from rollpacker.runtime.durable import replace_file
from rollpacker.runtime.lock import RunLock
from rollpacker.runtime.metrics import Metrics, Tail
from rollpacker.runtime.phases import Alone, DisplacedError, Phases, StoppedError
from rollpacker.runtime.pool import WorkerError
from rollpacker.runtime.progress import Progress
from rollpacker.runtime.step import StepRecord
from rollpacker.runtime.watch import Watch


@dataclass(slots=True)
class Counters:
    """What a run counts; saved with every checkpoint."""

    step: int = 0
    epochs: int = 0
    prompts_trained: int = 0
    num_tokens: int = 0
    kept_tokens: int = 0
    aborted_tokens: int = 0
    decode_steps: int = 0
    generated_tokens: int = 0
    short_rounds: int = 0
    long_rounds: int = 0
    deferred: int = 0
    rollout_s: float = 0.0
    train_s: float = 0.0
    step_s: float = 0.0
    worker_cpu_s: float = 0.0
    decode_cpu_s: float = 0.0
    true_tokens: float = 0.0


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    phases: Phases | None = None,
) -> Path:
    """Run a job to its end, or until Ctrl-C; returns the run's folder.

    With ``phases`` it shares nodes: each step's rollout and training wait for theirs. Raises
    ``ValueError`` for the user's mistakes and ``WorkerError`` when workers are lost.
    """
    folder = Path(config.output)
    progress = progress or Progress()
    with RunLock(folder):
        while True:
            try:
                asyncio.run(_train(config, folder, resume, progress, phases))
                break
            except DisplacedError as error:
                progress.note(f"WARNING {error}")
                resume = True
        write_reports(folder, progress)
    return folder


def write_reports(folder: Path, progress: Progress) -> None:
    """``report.html`` and ``timeline.json``; without the report extra, a line that says so."""
    try:
        from rollpacker.report.run_report import write_report
        from rollpacker.report.timeline import write_timeline

        write_timeline(folder)
        write_report(folder)
    except (ImportError, OSError, ReportError) as error:
        progress.note(f"no report: {error}")


async def _train(
    config: RunConfig, folder: Path, resume: bool, progress: Progress, phases: Phases | None
) -> None:
    checkpoints = Checkpoints(folder, config.checkpoint.keep)
    found = checkpoints.latest()
    for problem in checkpoints.problems:
        progress.note(f"WARNING {problem}; an older checkpoint is used")
    config = with_learning_rate(config, found if resume else None, progress)
    start = choose_start(config, folder, found, resume)
    parts = await build(config, folder, progress, start, phases)
    phases = phases or Alone()
    breaker = Breaker()
    displaced = False
    try:
        job = Job(config, folder, parts, checkpoints, phases)
        await phases.open(lambda: parts.pool.pids, breaker.trip, parts.rollout.release_tail)
        await job.restore(start)
        await breaker.run(job.run())
    except DisplacedError:
        displaced = True
        raise
    finally:
        await phases.close(displaced=displaced)
        parts.close()


def _check_graded(record: StepRecord) -> None:
    """A step without a single reward: going on would drop every prompt, one after the other."""
    if record.faults and all(attempt.reward is None for attempt in record.attempts.values()):
        raise ValueError(f"step {record.step}: no response got a reward: {record.faults[-1]}")


class Job:
    """A built job."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        parts: Parts,
        checkpoints: Checkpoints,
        phases: Phases,
    ) -> None:
        self._config = config
        self._folder = folder
        self._parts = parts
        self._checkpoints = checkpoints
        self._phases = phases
        self._counters = Counters()
        self._summary: dict[str, Any] = {}
        self._saved = -1
        self._interrupted = False

    async def restore(self, start: Start) -> None:
        """Load the checkpoint, if there is one, and write the journal's head."""
        parts = self._parts
        if start.state is not None:
            state = start.state
            assert start.path is not None
            await parts.pool.ask(msg.Load(folder=str(start.path)), parts.pool.workers)
            parts.policy.load_state_dict(state["policy"])
            parts.problems.source.load_state_dict(state["source"])
            parts.rewards.load_state_dict(state["rewards"])
            self._counters = Counters(**state["counters"])
            self._summary = state["summary"]
            self._saved = self._counters.step
        parts.log.journal.meta(
            {"settings": parts.settings.to_json(), "state": parts.policy.state_dict()}
        )

    async def run(self) -> None:
        """The train loop."""
        parts, config, count = self._parts, self._config, self._counters
        first = count.step
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._interrupt)
        parts.log.progress.start(config.output, total_steps(config, parts.problems), count.step)
        if await self._may_roll_out() and "before" not in self._summary:
            self._summary["before"] = await self._evaluate(greedy=True)
        gc.collect()
        gc.freeze()  # collections must not walk the libraries' objects again and again
        watching = asyncio.create_task(self._watch().run())
        over = self._over()
        while not over and await self._may_roll_out():
            self._recall_graded()
            record = await parts.rollout.run_step(count.step)
            _check_graded(record)
            self._count(record)
            await self._finish_step(record)
            over = self._interrupted or self._over()
            if not over:
                await self._phases.end()
        watching.cancel()
        parts.log.graded.clear()
        if count.step > self._saved:
            await self._save()
        if not self._interrupted:
            self._summary["after"] = await self._evaluate(greedy=True)
        if count.step > first:
            await self._phases.end()
        self._summary["mux"] = self._phases.stats
        self._write_summary()
        if self._saved < count.step:
            raise CheckpointError(
                f"{self._folder}: the last checkpoint cannot be written, so the steps after step "
                f"{max(self._saved, 0)} are lost: free some space, then --resume auto"
            )

    async def _may_roll_out(self) -> bool:
        """Wait for the nodes; False when Ctrl-C comes first."""
        try:
            await self._phases.begin("rollout")
        except StoppedError:
            self._interrupted = True
            return False
        return True

    def _recall_graded(self) -> None:
        """Take up what an interrupted run of this step had graded with the same weights."""
        weights = None
        # Whoever finished before wins the race again, but others than in one go may come next.
        races = self._config.rollout.tail_batching.mode not in ("off", "exact")
        if not (self._config.deterministic and races):
            weights = self._checkpoints.fingerprint(self._counters.step)
        known = self._parts.log.graded.begin(self._counters.step, weights)
        if known:
            self._parts.log.progress.note(
                f"step {self._counters.step}: {known} graded responses of the interrupted run are "
                "used again"
            )

    def _watch(self) -> Watch:
        parts = self._parts
        return Watch(
            parts.log.progress,
            record=lambda: parts.rollout.record,
            queue=lambda: parts.policy.queue,
            prompts=self._config.rollout.prompts_per_step,
            clock=parts.clock,
        )

    def _interrupt(self) -> None:
        if not self._interrupted:
            self._parts.log.progress.note("interrupted: finishing the step, then a checkpoint")
        self._interrupted = True
        self._phases.interrupt()

    def _over(self) -> bool:
        """Whether the run is done; begins the next epoch when this one is used up."""
        config, source = self._config, self._parts.problems.source
        if config.steps and self._counters.step >= config.steps:
            return True
        left = sum(source.remaining().values()) + self._parts.policy.held
        enough = self._config.rollout.prompts_per_step if config.data.drop_last else 1
        if left >= enough:
            return False
        self._counters.epochs = source.epoch + 1
        self._parts.rollout.end_epoch(source.epoch)
        if not config.steps and self._counters.epochs >= config.epochs:
            return True
        source.next_epoch()
        return False

    async def _finish_step(self, record: StepRecord) -> None:
        """Evaluate and checkpoint when due, then write the step's metrics."""
        config, count = self._config, self._counters
        extra: Metrics = {}
        if config.eval is not None and config.eval.every and not count.step % config.eval.every:
            extra |= await self._evaluate()
        self._log(record, extra)
        if config.checkpoint.every and not count.step % config.checkpoint.every:
            await self._save()

    def _count(self, record: StepRecord) -> None:
        count = self._counters
        kept = sum(attempt.tokens for attempt in record.kept)
        count.step += 1
        count.prompts_trained += len(record.trained)
        count.kept_tokens += kept
        count.num_tokens += kept + sum(len(a.request.prompt) for a in record.kept)
        count.aborted_tokens += record.aborted_tokens()
        count.short_rounds += record.kind == "short"
        count.long_rounds += record.kind == "long"
        count.deferred += len(record.deferred)
        count.rollout_s += record.rollout_end_s - record.start_s
        count.step_s += record.end_s - record.start_s
        count.train_s += record.end_s - record.rollout_end_s

    def _log(self, record: StepRecord, extra: Metrics) -> None:
        parts, count = self._parts, self._counters
        bias = parts.policy.bias()
        tail = Tail(
            round_kind=record.kind,
            long_queue=parts.policy.queue,
            deferred=len(record.deferred),
            aborted_tokens=record.aborted_tokens(),
            kept_vs_true_len=bias.kept_vs_true_len,
        )
        for alarm in bias.alarms:
            parts.log.progress.note(f"WARNING step {record.step}: {alarm}")
        source = parts.problems.source
        drawn = 1.0 - sum(source.remaining().values()) / sum(source.quotas.values())
        metrics = parts.log.step(
            record,
            parts.updates.groups,
            epoch=source.epoch + drawn,
            tail=tail,
            num_tokens=count.num_tokens,
            extra=extra,
        )
        kept = sum(attempt.tokens for attempt in record.kept)
        count.true_tokens += kept / bias.kept_vs_true_len
        count.decode_steps += int(metrics["engine/steps"])
        count.generated_tokens += int(metrics["engine/generated_tokens"])
        count.worker_cpu_s += float(metrics["timing_s/worker_cpu"])
        count.decode_cpu_s += float(metrics["timing_s/decode_cpu"])

    async def _evaluate(self, *, greedy: bool = False) -> dict[str, float]:
        """Sampled accuracy on the held-out problems, with ``greedy`` the greedy one too."""
        evaluator = self._parts.evaluator
        if evaluator is None:
            return {}
        result = await evaluator.run(self._counters.step)
        if greedy:
            result |= await evaluator.run(self._counters.step, greedy=True)
        return result

    async def _save(self) -> None:
        """Write a checkpoint; training goes on without it when the disk is full."""
        parts = self._parts
        parts.log.flush()
        parts.updates.check_next()
        state = {
            "config": self._config.model_dump(mode="json"),
            "policy": parts.policy.state_dict(),
            "source": parts.problems.source.state_dict(),
            "rewards": parts.rewards.state_dict(),
            "counters": {n: getattr(self._counters, n) for n in Counters.__slots__},
            "summary": self._summary,
            "clock_s": parts.clock(),
        }
        loop = asyncio.get_running_loop()

        def write(folder: Path) -> None:
            save = parts.pool.ask(msg.Save(folder=str(folder)), parts.pool.workers[:1])
            asyncio.run_coroutine_threadsafe(save, loop).result()

        step = self._counters.step
        try:
            await asyncio.to_thread(self._checkpoints.save, step, write, state)
        except (CheckpointError, WorkerError) as error:
            if not parts.pool.workers:
                raise
            parts.log.progress.note(f"WARNING {error}; the run goes on without it")
        else:
            self._saved = step

    def _write_summary(self) -> None:
        count = self._counters
        kept_vs_true = count.kept_tokens / count.true_tokens if count.true_tokens else 1.0
        self._summary |= {
            "steps": count.step,
            "prompts_trained": count.prompts_trained,
            "epochs": count.epochs,
            "interrupted": self._interrupted,
            "workers": len(self._parts.pool.workers),
            "num_tokens": count.num_tokens,
            "kept_tokens": count.kept_tokens,
            "decoded_tokens": count.generated_tokens,
            "decode_steps": count.decode_steps,
            "timing_s": {
                "rollout": count.rollout_s,
                "train": count.train_s,
                "steps": count.step_s,
                "worker_cpu": count.worker_cpu_s,
                "decode_cpu": count.decode_cpu_s,
            },
            "tail": {
                "short_rounds": count.short_rounds,
                "long_rounds": count.long_rounds,
                "deferred": count.deferred,
                "aborted_tokens": count.aborted_tokens,
                "kept_vs_true_len": kept_vs_true,
            },
        }
        data = json.dumps(self._summary, indent=1).encode()
        with contextlib.suppress(OSError):
            replace_file(self._folder / "summary.json", data)
