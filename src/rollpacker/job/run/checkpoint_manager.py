"""What a job keeps for the time after it was stopped: checkpoints, and grades of a dropped step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.job.plan.build import Parts
from rollpacker.job.plan.resume import code_of
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import WorkerError, spawn
from rollpacker.runtime.record.checkpoint import CheckpointError, Checkpoints
from rollpacker.runtime.record.metrics import Counters


class CheckpointManager:
    """Writes the checkpoints of a job.

    Args:
        config: the run's.
        parts: whose state they hold.
        checkpoints: those of the run.
    """

    def __init__(self, config: RunConfig, parts: Parts, checkpoints: Checkpoints) -> None:
        self._config = config
        self._parts = parts
        self._checkpoints = checkpoints
        self._begun: dict[str, Any] | None = None
        self._committing: asyncio.Task[None] | None = None
        self._code = code_of(config)  # as it is imported, not as it may be edited meanwhile
        self.saved = -1
        """Step of the newest checkpoint of the run that is durable."""
        self.slowest_s = 0.0
        """Seconds of the slowest checkpoint so far."""

    def restore(self, step: int, summary: dict[str, Any]) -> None:
        """The run goes on from the checkpoint of ``step``; puts the best one into ``summary``.

        The marker in the run's folder and the checkpoint's own summary differ by a kill between the
        two; one that is damaged, or later than what is gone on from, does not count.
        """
        self.saved = step
        named = [best for best in (summary.pop("best", None), self._checkpoints.marker()) if best]
        there = [b for b in named if b["step"] <= step and self._checkpoints.there(b["step"])]
        best = max(there, key=lambda b: b["step"], default=None)
        if best is not None:
            summary["best"] = best
        self._mark(best)

    async def evaluated(
        self, counters: Counters, summary: dict[str, Any], result: Mapping[str, float]
    ) -> None:
        """Keep the checkpoint of the weights in place if no evaluation was better so far.

        Raises ``ValueError`` when evaluations have no such metric.
        """
        metric = self._config.checkpoint.best
        # Greedy answers are measured before and after a run only: they choose nothing.
        result = {name: v for name, v in result.items() if not name.startswith("eval/greedy_")}
        if not metric or not result:
            return
        if metric not in result:
            raise ValueError(
                f"checkpoint.best: evaluations have no '{metric}'; they have "
                f"{', '.join(sorted(result))}"
            )
        best = summary.get("best")
        beaten = best is None or best["metric"] != metric or result[metric] > best["value"]
        if not beaten or not counters.step:
            return
        step = counters.step
        await self.settle()
        best = {"step": step, "checkpoint": f"checkpoint-{step}"}
        best |= {"metric": metric, "value": result[metric]}
        if self.saved != step:
            await self.keep(counters, summary | {"best": best})
        if self.saved == step:
            summary["best"] = best
            self._mark(best)

    def _mark(self, best: dict[str, Any] | None) -> None:
        try:
            self._checkpoints.keep_best(best)
        except OSError as error:
            self._parts.log.progress.note(f"WARNING best.json cannot be written ({error})")

    def begin_step(self, counters: Counters) -> None:
        """Remember the state that a step begins with, should it be dropped."""
        self._begun = None if self.saved == counters.step else self._state(counters)

    def _state(self, counters: Counters) -> dict[str, Any]:
        parts = self._parts
        return {
            "config": self._config.model_dump(mode="json"),
            "cwd": str(Path.cwd()),
            "code": self._code,
            "policy": parts.policy.state_dict(),
            "source": parts.problems.source.state_dict(),
            "rewards": parts.rewards.state_dict(),
            "empty_steps": parts.empty_steps.state_dict(),
            "counters": counters.state_dict(),
        }

    async def settle(self) -> None:
        """Wait until what was saved is durable, or given up."""
        if self._committing is not None:
            await self._committing

    async def keep(
        self, counters: Counters, summary: dict[str, Any], *, dropped: bool = False
    ) -> None:
        """A checkpoint of this step that is durable, if there is none."""
        await self.settle()
        if self.saved < counters.step:
            await self.save(counters, summary, dropped=dropped)
            await self.settle()

    async def save(
        self, counters: Counters, summary: dict[str, Any], *, dropped: bool = False
    ) -> None:
        """Write a checkpoint, which becomes durable while training goes on; it goes on without it
        when the disk is full.

        With ``dropped`` it is of the state that the step in flight has begun with. Emulated
        devices have nothing to keep.
        """
        parts = self._parts
        if parts.emulation is not None:
            self.saved = counters.step
            return
        await self.settle()
        parts.log.flush()
        parts.updates.check_next()
        state = self._begun if dropped else self._state(counters)
        assert state is not None
        state = state | {"summary": summary, "clock_s": parts.clock()}
        loop = asyncio.get_running_loop()

        def write(folder: Path) -> None:
            save = parts.pool.ask(msg.Save(folder=str(folder.absolute())), parts.pool.replicas[:1])
            asyncio.run_coroutine_threadsafe(save, loop).result()
            if parts.driver.carried is not None:
                parts.driver.carried.save(folder, begun=dropped)

        step, began = counters.step, time.monotonic()
        try:
            await asyncio.to_thread(self._checkpoints.write, step, write, state)
        except (CheckpointError, WorkerError) as error:
            if not parts.pool.replicas:
                raise WorkerError(f"{error}; no replica is left") from error
            parts.log.progress.note(f"WARNING {error}; the run goes on without it")
        else:
            self._committing = spawn(self._commit(step, began))

    async def _commit(self, step: int, began: float) -> None:
        try:
            await asyncio.to_thread(self._checkpoints.commit, step)
        except CheckpointError as error:
            self._parts.log.progress.note(f"WARNING {error}; the run goes on without it")
        else:
            self.saved = step
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
