"""One RL job from configuration to trained model; reads like a table of contents.

Every step generates, trains and publishes: a round of rollouts is sampled, graded and summed into
gradients as groups finish; one update changes the weights; the engines get them.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import EvalConfig, RunConfig
from rollpacker.durable import disk_full, replace_file
from rollpacker.job.plan.build import Parts, build, total_steps
from rollpacker.job.plan.defaults import with_gpu_defaults, with_learning_rate
from rollpacker.job.plan.emulated import sum_up, title
from rollpacker.job.plan.resume import RunStart, choose_start
from rollpacker.job.run.checkpoint_manager import CheckpointManager
from rollpacker.job.run.lock import RunLock
from rollpacker.job.run.stopping import Restarts, Signals, Stopped, StoppedAtOnceError, Stopping
from rollpacker.job.run.worker_recovery import WorkerRecovery
from rollpacker.report.of_run import write_reports
from rollpacker.runtime.evaluate import Evaluator
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
    """What was asked for, and what it may use."""

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
    """Run a job to its end; returns the run's folder.

    With ``phases`` it shares nodes: each step's rollout and training wait for theirs. Raises
    ``ValueError`` for the user's mistakes, ``WorkerError`` when workers are lost, and ``Stopped``
    (a ``SystemExit``) when a signal has stopped the run early, its work being kept.
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
                    f"stopped by {stop.number.name}: nothing was under way that is not kept; go on "
                    "with --resume auto"
                )
            raise
    if signals.taken is not None:
        raise Stopped(signals.taken)
    return folder


def _run(order: _Order, resume: bool) -> bool:
    """Whether the job is over; it is to be resumed when its nodes have failed."""
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
        order.progress.note(f"WARNING {error}; {order.restarts}")
        return False
    except StoppedAtOnceError:
        return True
    except WaitStoppedError as error:
        order.progress.note(str(error))
    except OSError as error:
        if not disk_full(error):
            raise
        raise CheckpointError(
            f"{folder}: no space left ({error}); free some or change 'output', then --resume auto "
            "goes on from the newest checkpoint"
        ) from error
    return True


async def _train(order: _Order, resume: bool) -> None:
    config, folder, progress, signals = order.config, order.folder, order.progress, order.signals
    signals.react()
    checkpoints = Checkpoints(folder, config.checkpoint.keep)
    found = checkpoints.latest()
    for problem in checkpoints.problems:
        progress.note(f"WARNING {problem}; an older checkpoint is used")
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
        job = BuiltJob(config, folder, parts, checkpoints, phases, signals, breaker)
        opening = phases.open(parts.pool, breaker.trip, parts.rollout.release_tail)
        await breaker.run(_work(order, job, start, opening))
    except DisplacedError:
        displaced = True
        raise
    finally:
        signals.react(first=lambda: None)
        if not frozen:  # by whoever called this, who may have much that is never garbage
            gc.unfreeze()  # another one may follow, or whatever the process does besides
        gc.set_threshold(*collected)
        try:
            await phases.close(displaced=displaced)
        finally:
            parts.close()


async def _work(order: _Order, job: BuiltJob, start: RunStart, opening: Awaitable[None]) -> None:
    """Whatever may wait for something that a callback brings."""
    await opening
    await job.restore(start)
    order.restarts.begin()
    job.stopping.begin()
    await job.run()


class BuiltJob:
    """A built job."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        parts: Parts,
        checkpoints: Checkpoints,
        phases: PhaseNodes,
        signals: Signals,
        breaker: Breaker,
    ) -> None:
        self._config = config
        self._folder = folder
        self._parts = parts
        self._phases = phases
        self._signals = signals
        self._counters = Counters()
        self._manager = CheckpointManager(config, parts, checkpoints)
        shared = not isinstance(phases, OwnNodes)
        self._recovery = WorkerRecovery(
            parts.pool,
            folder,
            tries=0 if shared or parts.emulation is not None else config.cluster.restarts,
            wait=config.deterministic or parts.pool.takes_turns,
            note=parts.log.progress.note,
        )
        self._summary: dict[str, Any] = {}
        self.stopping = Stopping(
            config.checkpoint.grace_s,
            parts,
            phases,
            signals,
            self._manager,
            lambda: self._counters.step,
            breaker,
        )
        self._evaluations = Evaluations(
            config.eval,
            parts.evaluator,
            self._manager,
            self.stopping,
            lambda: self._counters,
            late=shared,
        )

    async def restore(self, start: RunStart) -> None:
        """Load the checkpoint, if there is one, and write the journal's head."""
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
            if parts.rollout.carried is not None:
                parts.rollout.carried.load(start.path, self._counters.step)
            self._summary = state["summary"]
            self._manager.restore(self._counters.step, self._summary)
        for text in await publish(parts.pool, self._counters.step):
            parts.log.progress.note(f"WARNING {text}")
        parts.log.journal.meta(parts.policy.journal_head())

    async def run(self) -> None:
        parts, config, count = self._parts, self._config, self._counters
        first = count.step
        shown = title(config, parts.emulation)
        parts.log.progress.start(shown, total_steps(config, parts.problems), count.step)
        if await self._may_roll_out() and "before" not in self._summary:
            await self._evaluations.whole("before", self._summary)
        gc.collect()
        gc.freeze()  # collections must not walk the libraries' objects again and again
        # Nor all attempts of a large step while reports wait: each step has its time for that.
        gc.set_threshold(700, 10, 1000)
        watching = spawn(self._watch().run())
        over = self.stopping.interrupted or self._over()
        if over and first:
            more = "raise 'steps' or 'epochs' for more"
            parts.log.progress.note(f"nothing to do: all {first} steps are done; {more}")
        dropped = False
        while not over and await self._may_roll_out():
            late = await self._evaluations.before_a_step()
            await self._manager.evaluated(count, self._summary, late)
            self._manager.begin_step(count)
            cpu_s = time.process_time()
            try:
                record = await self._step(count.step)
            except DroppedError:
                dropped = True
                break
            count.driver_cpu_s += time.process_time() - cpu_s
            record.check_graded()
            count.add(record)
            too_many = parts.empty_steps.too_many(len(record.trained))
            await self._finish_step(record, late)
            if too_many:
                await self._give_up()
            await asyncio.sleep(0)  # what a step leaves and what begins one are long enough alone
            over = self.stopping.interrupted or self._over()
            over = over or not await leave(self._phases)
            if not over and await self._recovery.between_steps(count.step):
                parts.updates.check_next()
        watching.cancel()
        await self._finish(first, dropped)

    async def _give_up(self) -> None:
        """Keep what there is of a run that goes on without training. Raises ``ValueError``."""
        await self._manager.keep(self._counters, self._summary)
        self._write_summary()
        raise ValueError(f"step {self._counters.step - 1}: {self._parts.empty_steps}")

    async def _step(self, step: int) -> StepRecord:
        """The algorithm: every token of a step is sampled by the weights that the last one left."""
        rollout = self._parts.rollout
        with rollout.step(step):
            # When the engines have begun to decode.
            asyncio.get_running_loop().call_soon(gc.collect)
            await rollout.generate()
            await rollout.train()
            await rollout.publish()
        return rollout.record

    async def _finish(self, first: int, dropped: bool) -> None:
        """Keep what is new, evaluate when all is done, and say how it ended."""
        parts, count = self._parts, self._counters
        await self._manager.keep(count, self._summary, dropped=dropped)
        if dropped:
            parts.log.progress.note(f"step {count.step} is dropped on its way")
        trained = count.step > first
        left = not trained or await leave(self._phases)
        if left and not self.stopping.interrupted:
            await self._evaluate_the_end(trained)
        if trained:
            for line in self._last_words():
                parts.log.progress.note(line)
        self._summary["mux"] = self._phases.stats
        self._write_summary()
        if self._manager.saved < count.step:
            raise CheckpointError(
                f"{self._folder}: the last checkpoint cannot be written, so all but the first "
                f"{max(self._manager.saved, 0)} steps are lost: free some space, then --resume auto"
            )
        if self._signals.taken is not None and parts.emulation is None:
            parts.log.progress.note(
                f"stopped by {self._signals.taken.name}: checkpoint-{count.step} holds all "
                f"{count.step} steps; go on with --resume auto"
            )

    def _last_words(self) -> Iterator[str]:
        """What is to be said of all steps together."""
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

    async def _evaluate_the_end(self, trained: bool) -> None:
        """On nodes to decode on, if it takes any."""
        possible = self._parts.evaluator is not None
        if possible and not await self._may_roll_out():
            return
        await self._evaluations.whole("after", self._summary)
        if possible and trained:
            await leave(self._phases)

    async def _may_roll_out(self) -> bool:
        """Wait for the nodes; False when a signal comes first."""
        try:
            await self._phases.begin("rollout")
        except WaitStoppedError:
            self.stopping.interrupted = True
            return False
        return True

    def _watch(self) -> Watch:
        parts = self._parts
        return Watch(
            parts.log.progress,
            record=lambda: parts.rollout.record,
            queue=lambda: parts.policy.queue,
            prompts=self._config.rollout.prompts_per_step,
            clock=parts.clock,
            trouble=parts.rewards.trouble,
        )

    def _over(self) -> bool:
        """Whether the run is done; begins the next epoch when this one is used up."""
        config, source = self._config, self._parts.problems.source
        if config.steps and self._counters.step >= config.steps:
            return True
        left = sum(source.remaining().values()) + self._parts.policy.queue
        enough = self._config.rollout.prompts_per_step if config.data.drop_last else 1
        if left >= enough:
            return False
        self._counters.epochs = source.epoch + 1
        self._parts.rollout.end_epoch(source.epoch)
        if not config.steps and self._counters.epochs >= config.epochs:
            return True
        source.next_epoch()
        return False

    async def _finish_step(self, record: StepRecord, late: dict[str, float]) -> None:
        """Evaluate and checkpoint when due, then write the step's metrics, with those of an
        evaluation that was late."""
        config, count = self._config, self._counters
        extra = await self._evaluations.after_a_step()
        parts = self._parts
        await parts.log.step(
            record,
            parts.updates.groups,
            policy=parts.policy,
            counters=count,
            epoch=parts.problems.source.passed,
            extra={**late, **extra},
        )
        await self._manager.evaluated(count, self._summary, extra)
        due = config.checkpoint.every and not count.step % config.checkpoint.every
        # It could not be kept later: then the trainers' nodes are another job's.
        due = due or (config.checkpoint.best and self._evaluations.put_off)
        if due and self._manager.saved < count.step:
            await self._manager.save(count, self._summary)
        parts.log.journal.turn(parts.policy.journal_head, config.checkpoint.journal_mb * 1e6)

    def _write_summary(self) -> None:
        self._summary |= self._counters.summary()
        note = self._parts.log.progress.note
        self._summary |= sum_up(self._parts.emulation, self._counters, note)
        self._summary["interrupted"] = self.stopping.interrupted
        self._summary["workers"] = len(self._parts.pool.engines)
        self._summary["cores"] = cores(self._config)
        data = json.dumps(self._summary, indent=1).encode()
        with contextlib.suppress(OSError):
            replace_file(self._folder / "summary.json", data)


class Evaluations:
    """Before the first step, after the last one and as often as was asked for.

    Args:
        config: None without any.
        evaluator: None without problems.
        manager: keeps the best checkpoint.
        stopping: knows whether there is still time.
        counters: of the run, at this moment.
        late: the engines' nodes are another job's until the next rollout.
    """

    def __init__(
        self,
        config: EvalConfig | None,
        evaluator: Evaluator | None,
        manager: CheckpointManager,
        stopping: Stopping,
        counters: Callable[[], Counters],
        *,
        late: bool,
    ) -> None:
        self._every = 0 if config is None else config.every
        self._evaluator = evaluator
        self._manager = manager
        self._stopping = stopping
        self._counters = counters
        self._late = late

    def _due(self) -> bool:
        return bool(self._every) and not self._counters().step % self._every

    @property
    def put_off(self) -> bool:
        """Whether one is due that has to wait for nodes to decode on."""
        return self._late and self._counters().step > 0 and self._due()

    async def before_a_step(self) -> dict[str, float]:
        """The metrics of one that was put off."""
        return await self._run() if self.put_off else {}

    async def after_a_step(self) -> dict[str, float]:
        """The metrics of one that is due, of the weights that the step has left."""
        return await self._run() if self._due() and not self._late else {}

    async def whole(self, when: str, summary: dict[str, Any]) -> None:
        """Sampled and greedy, into ``summary``; one that was dropped is done on resume."""
        result = await self._run(greedy=True)
        if not self._stopping.hurried:
            await self._manager.evaluated(self._counters(), summary, result)
            summary[when] = result

    async def _run(self, *, greedy: bool = False) -> dict[str, float]:
        """Empty without held-out problems, and where there is no time left."""
        if self._evaluator is None or self._stopping.hurried:
            return {}
        try:
            step = self._counters().step
            result = await self._evaluator.run(step, step=step)
            if greedy:
                both = await self._evaluator.run(step, greedy=True, step=step)
                both["eval/ungraded"] += result["eval/ungraded"]
                result |= both
        except DroppedError:
            return {}
        return result
