"""One RL job from configuration to trained model. ``_Job.run`` is its loop over steps.
``runtime/step/driver.py`` has the loop over the events of a step."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.durable import disk_full
from rollpacker.job.plan.build import Parts, build, total_steps
from rollpacker.job.plan.defaults import with_gpu_defaults, with_learning_rate
from rollpacker.job.plan.emulated import sum_up, title
from rollpacker.job.plan.resume import RunStart, choose_start
from rollpacker.job.run.checkpoint_manager import CheckpointManager
from rollpacker.job.run.lock import RunLock
from rollpacker.job.run.stopping import Restarts, Signals, Stopped, StoppedAtOnceError, Stopping
from rollpacker.job.run.worker_recovery import WorkerRecovery
from rollpacker.report.of_run import write_reports
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Breaker, NoRoomError, WorkerError, spawn
from rollpacker.runtime.record.checkpoint import CheckpointError, Checkpoints, newest_step
from rollpacker.runtime.record.metrics import Counters
from rollpacker.runtime.record.progress import Progress, Watch
from rollpacker.runtime.record.run_log import cores
from rollpacker.runtime.step.phase_nodes import (
    DisplacedError,
    OwnNodes,
    PhaseNodes,
    WaitStoppedError,
    leave,
)
from rollpacker.runtime.step.publishing import publish
from rollpacker.runtime.step.step import DroppedError, StepRecord


@dataclass(frozen=True, slots=True)
class _Order:
    config: RunConfig
    folder: Path
    progress: Progress
    phases: PhaseNodes | None
    signals: Signals
    restarts: Restarts


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    phases: PhaseNodes | None = None,
) -> Path:
    """Run a job to its end and return the run's folder.

    With ``phases`` it shares nodes: each step's rollout and training wait for their nodes. Raises
    ``ValueError`` for the user's mistakes and ``WorkerError`` if workers are lost. If a signal has
    stopped the run early, it keeps the work and raises ``Stopped``, a ``SystemExit``.
    """
    folder = Path(config.output)
    progress = progress or Progress()
    lock = RunLock(folder, progress.note if config.mux.managed else None)
    with lock, Signals(config.checkpoint.signals) as signals:
        own = phases is None and config.devices.emulate is None
        restarts = Restarts(config.cluster.restarts if own else 0)
        order = _Order(config, folder, progress, phases, signals, restarts)
        try:
            while not _run(order, resume):
                resume = True
            if signals.taken in (None, signal.SIGINT):
                signals.react()
                write_reports(folder, progress.note)
        except Stopped as stop:
            if not stop.said:
                progress.note(
                    f"stopped by {stop.number.name}: no work is lost. Continue with --resume auto."
                )
            raise
    if signals.taken is not None:
        raise Stopped(signals.taken)
    return folder


def _run(order: _Order, resume: bool) -> bool:
    """Return whether the job is over. If nodes have failed, the caller resumes it."""
    folder = order.folder
    try:
        if order.signals.taken is None:
            asyncio.run(_train(order, resume))
    except DisplacedError as error:
        order.progress.note(f"WARNING {error}")
        return False
    except (WorkerError, NoRoomError) as error:
        if not order.restarts.again(newest_step(folder), error):
            raise
        order.progress.note(f"WARNING {error}, so {order.restarts}")
        return False
    except StoppedAtOnceError:
        return True
    except WaitStoppedError as error:
        order.progress.note(str(error))
    except OSError as error:
        if not disk_full(error):
            raise
        raise CheckpointError(
            f"{folder}: no space left ({error}). Free some or change 'output', then continue from "
            "the newest checkpoint with --resume auto"
        ) from error
    return True


async def _train(order: _Order, resume: bool) -> None:
    config, folder, progress, signals = order.config, order.folder, order.progress, order.signals
    signals.react()
    checkpoints = Checkpoints(folder, config.checkpoint.keep)
    found = checkpoints.latest()
    for problem in checkpoints.problems:
        progress.note(f"WARNING {problem}. An older checkpoint is used.")
    config = with_gpu_defaults(config, progress, found if resume else None)
    config = with_learning_rate(config, found if resume else None, progress)
    start = choose_start(config, folder, found, resume)
    for line in start.changed:
        progress.note(line)
    parts = await Breaker().run(build(config, folder, progress, start, order.phases))
    phases = order.phases or OwnNodes()
    breaker = Breaker()
    displaced, collected, frozen = False, gc.get_threshold(), gc.get_freeze_count()
    try:
        job = _Job(order, config, parts, checkpoints, phases, breaker)
        opening = phases.open(parts.pool, breaker.trip, parts.driver.release_tail)
        await breaker.run(job.run(start, opening))
    except DisplacedError:
        displaced = True
        raise
    finally:
        signals.react(first=lambda: None)
        if not frozen:  # else the caller has frozen objects of its own
            gc.unfreeze()  # this process may go on
        gc.set_threshold(*collected)
        try:
            await phases.close(displaced=displaced)
        finally:
            parts.close()


class _Job:
    def __init__(
        self,
        order: _Order,
        config: RunConfig,
        parts: Parts,
        checkpoints: Checkpoints,
        phases: PhaseNodes,
        breaker: Breaker,
    ) -> None:
        self._order = order
        self._config = config
        self._parts = parts
        self._phases = phases
        self._say = order.progress.note
        self._counters = Counters()
        self._summary: dict[str, Any] = {}
        self._manager = CheckpointManager(config, parts, checkpoints)
        self._shared = not isinstance(phases, OwnNodes)
        self._recovery = WorkerRecovery(
            parts.pool,
            order.folder,
            tries=0 if self._shared or parts.emulation is not None else config.cluster.restarts,
            wait=config.deterministic or parts.pool.takes_turns,
            note=self._say,
        )
        self._stopping = Stopping(
            config.checkpoint.grace_s,
            parts,
            phases,
            order.signals,
            self._manager,
            lambda: self._counters.step,
            breaker,
        )

    # The loop over steps ------------------------------------------------------------------------

    async def run(self, start: RunStart, opening: Awaitable[None]) -> None:
        """Run steps: each one samples with the last one's weights, grades, learns and publishes.
        After each one the job evaluates, records and checkpoints."""
        await opening
        await self._restore(start)
        parts, count, first = self._parts, self._counters, self._counters.step
        watching = await self._begin(first)
        dropped, over = False, self._over()
        if over and first and not self._stopping.interrupted:
            more = "raise 'steps' or 'epochs' for more"
            self._say(f"nothing to do: all {first} steps are done, {more}")
        while not over and await self._may_roll_out():
            late = await self._evaluate() if self._put_off else {}
            await self._manager.evaluated(count, self._summary, late)
            self._manager.begin_step(count)
            cpu_s = time.process_time()
            try:
                # It runs when the engines have begun to decode.
                asyncio.get_running_loop().call_soon(gc.collect)
                record = await parts.driver.step(count.step)
            except DroppedError:
                dropped = True
                break
            record.check_graded()
            count.driver_cpu_s += time.process_time() - cpu_s
            bent = parts.policy.bias().kept_vs_true_len
            count.add(record, parts.updates.groups, bent, learns=parts.emulation is None)
            too_many = parts.empty_steps.too_many(len(record.trained))
            result = await self._evaluate() if self._due and not self._shared else {}
            await self._record(record, late | result)
            await self._manager.evaluated(count, self._summary, result)
            await self._checkpoint()
            if too_many:
                await self._give_up()
            await asyncio.sleep(0)  # the end of a step and the next begin are each long enough
            over = self._over() or not await leave(self._phases)
            if not over and await self._recovery.between_steps(count.step):
                parts.updates.check_next()
        watching.cancel()
        await self._finish(first, dropped)

    async def _restore(self, start: RunStart) -> None:
        parts = self._parts
        if start.state is not None:
            state = start.state
            assert start.path is not None
            await parts.pool.ask(msg.Load(folder=str(start.path.absolute())), parts.pool.replicas)
            parts.policy.load_state_dict(state["policy"])
            parts.problems.source.load_state_dict(state["source"])
            parts.rewards.load_state_dict(state["rewards"])
            parts.empty_steps.load_state_dict(state["empty_steps"])
            self._counters = Counters(**state["counters"])
            if parts.driver.carried is not None:
                parts.driver.carried.load(start.path, self._counters.step)
            self._summary = state["summary"]
            self._manager.restore(self._counters.step, self._summary)
        for text in await publish(parts.pool, self._counters.step):
            self._say(f"WARNING {text}")
        parts.log.journal.meta(parts.policy.journal_head())

    async def _begin(self, first: int) -> asyncio.Task[None]:
        """Let signals end the job, and return the task that shows its steps."""
        parts = self._parts
        self._order.restarts.begin()
        self._stopping.begin()
        shown = title(self._config, parts.emulation)
        parts.log.progress.start(shown, total_steps(self._config, parts.problems), first)
        if await self._may_roll_out() and "before" not in self._summary:
            await self._evaluate_whole("before")
        gc.collect()
        gc.freeze()  # collections need not walk the libraries' objects again and again
        # Nor all attempts of a large step while reports wait: each step collects by itself.
        gc.set_threshold(700, 10, 1000)
        watch = Watch(
            parts.log.progress,
            record=lambda: parts.driver.record,
            queue=lambda: parts.policy.queue,
            prompts=self._config.rollout.prompts_per_step,
            clock=parts.clock,
            trouble=parts.rewards.trouble,
        )
        return spawn(watch.run())

    def _over(self) -> bool:
        """Whether no step follows. If the epoch is used up, begin the next one."""
        config, count, source = self._config, self._counters, self._parts.problems.source
        if self._stopping.interrupted or (config.steps and count.step >= config.steps):
            return True
        left = sum(source.remaining().values()) + self._parts.policy.queue
        enough = config.rollout.prompts_per_step if config.data.drop_last else 1
        if left >= enough:
            return False
        count.epochs = source.epoch + 1
        self._parts.driver.end_epoch(source.epoch)
        if not config.steps and count.epochs >= config.epochs:
            return True
        source.next_epoch()
        return False

    async def _may_roll_out(self) -> bool:
        """Wait for the nodes. False if a signal comes first."""
        try:
            await self._phases.begin("rollout")
        except WaitStoppedError:
            self._stopping.interrupted = True
            return False
        return True

    async def _record(self, record: StepRecord, evaluated: dict[str, float]) -> None:
        parts = self._parts
        await parts.log.step(
            record,
            parts.updates.groups,
            policy=parts.policy,
            num_tokens=self._counters.num_tokens,
            epoch=parts.problems.source.passed,
            extra={**evaluated},
        )

    async def _checkpoint(self) -> None:
        """Write a checkpoint if it is due. Then a long journal goes on in another file."""
        settings, count, parts = self._config.checkpoint, self._counters, self._parts
        due = settings.every and not count.step % settings.every
        # A later checkpoint is impossible, as the trainers' nodes will be another job's.
        due = due or (settings.best and self._put_off)
        if due and self._manager.saved < count.step:
            await self._manager.save(count, self._summary)
        parts.log.journal.turn(parts.policy.journal_head, settings.journal_mb * 1e6)

    # Evaluations --------------------------------------------------------------------------------

    @property
    def _due(self) -> bool:
        every = 0 if self._config.eval is None else self._config.eval.every
        return bool(every) and not self._counters.step % every

    @property
    def _put_off(self) -> bool:
        """Whether an evaluation is due but must wait: another job has the nodes now."""
        return self._shared and self._counters.step > 0 and self._due

    async def _evaluate(self, *, greedy: bool = False) -> dict[str, float]:
        """Metrics of the current weights. Empty without held-out problems or time."""
        evaluator, step = self._parts.evaluator, self._counters.step
        if evaluator is None or self._stopping.hurried:
            return {}
        try:
            result = await evaluator.run(step, step=step)
            if greedy and not self._stopping.hurried:
                both = await evaluator.run(step, greedy=True, step=step)
                both["eval/ungraded"] += result["eval/ungraded"]
                result |= both
        except DroppedError:
            return {}
        return result

    async def _evaluate_whole(self, when: str) -> None:
        """Put the accuracies into the summary. A dropped evaluation runs on resume."""
        result = await self._evaluate(greedy=True)
        if not self._stopping.hurried:
            await self._manager.evaluated(self._counters, self._summary, result)
            self._summary[when] = result

    async def _evaluate_the_end(self, trained: bool) -> None:
        possible = self._parts.evaluator is not None
        if possible and not await self._may_roll_out():
            return
        await self._evaluate_whole("after")
        if possible and trained:
            await leave(self._phases)

    # The end ------------------------------------------------------------------------------------

    async def _give_up(self) -> None:
        await self._manager.keep(self._counters, self._summary)
        self._write_summary()
        raise ValueError(f"step {self._counters.step - 1}: {self._parts.empty_steps}")

    async def _finish(self, first: int, dropped: bool) -> None:
        count, signals = self._counters, self._order.signals
        await self._manager.keep(count, self._summary, dropped=dropped)
        if dropped:
            self._say(f"step {count.step} is dropped before its end")
        trained = count.step > first
        left = not trained or await leave(self._phases)
        if left and not self._stopping.interrupted:
            await self._evaluate_the_end(trained)
        if trained:
            for line in self._last_words():
                self._say(line)
        self._summary["mux"] = self._phases.stats
        self._write_summary()
        if self._manager.saved < count.step:
            raise CheckpointError(
                f"{self._order.folder}: the last checkpoint cannot be written, so all steps after "
                f"the first {max(self._manager.saved, 0)} are lost: free some space, then continue "
                "with --resume auto"
            )
        if signals.taken is not None and self._parts.emulation is None:
            self._say(
                f"stopped by {signals.taken.name}: checkpoint-{count.step} holds all "
                f"{count.step} steps. Continue with --resume auto."
            )

    def _last_words(self) -> Iterator[str]:
        parts, count, config = self._parts, self._counters, self._config
        planned = total_steps(config, parts.problems)
        if not config.steps and count.epochs >= config.epochs and count.step < planned:
            yield (
                f"the data ended after {count.step} of {planned} steps: {count.prompts_trained} "
                "prompts were trained on, the others were left out"
            )
        yield from parts.log.warnings.counted()
        if lesson := count.lesson():
            yield lesson

    def _write_summary(self) -> None:
        parts, count = self._parts, self._counters
        self._summary |= count.summary() | sum_up(parts.emulation, count, self._say)
        self._summary["interrupted"] = self._stopping.interrupted
        self._summary["workers"] = len(parts.pool.engines)
        self._summary["cores"] = cores(self._config)
        parts.log.sum_up(self._summary)
