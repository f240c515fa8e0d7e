"""Writes a job's checkpoints, and the state that a dropped step began with."""

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
    """Writes the checkpoints of a job, and restores its best one."""

    def __init__(self, config: RunConfig, parts: Parts, checkpoints: Checkpoints) -> None:
        self._config = config
        self._parts = parts
        self._checkpoints = checkpoints
        self._begun: dict[str, Any] | None = None
        self._committing: asyncio.Task[None] | None = None
        self._code = code_of(config)  # now, as files may be edited after their import
        self.saved = -1
        """The step of the newest durable checkpoint, -1 if there is none."""
        self.slowest_s = 0.0
        """Seconds of the slowest checkpoint so far."""

    def restore(self, step: int, summary: dict[str, Any]) -> None:
        """Go on from the checkpoint of ``step``, and put the best checkpoint into ``summary``.

        After a kill, the folder's marker and the summary may differ: the later usable one counts.
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
        """Keep the checkpoint of the current weights if no evaluation was better so far. Raises
        ``ValueError`` if evaluations have no such metric."""
        metric = self._config.checkpoint.best
        # Greedy answers are measured only before and after a run, so they choose no checkpoint.
        result = {name: v for name, v in result.items() if not name.startswith("eval/greedy_")}
        if not metric or not result:
            return
        if metric not in result:
            raise ValueError(
                f"checkpoint.best: evaluations have no metric '{metric}', only "
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
        """Remember the state at a step's beginning, in case that the step is dropped."""
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
        """Wait until the last checkpoint is durable or has failed."""
        if self._committing is not None:
            await self._committing

    async def keep(
        self, counters: Counters, summary: dict[str, Any], *, dropped: bool = False
    ) -> None:
        await self.settle()
        if self.saved < counters.step:
            await self.save(counters, summary, dropped=dropped)
            await self.settle()

    async def save(
        self, counters: Counters, summary: dict[str, Any], *, dropped: bool = False
    ) -> None:
        """Write a checkpoint, which becomes durable while training goes on. A full disk is only
        logged. If ``dropped``, it has the state at the step's beginning. Emulated devices write
        none."""
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
                raise WorkerError(f"{error}, and no replica is left") from error
            parts.log.progress.note(f"WARNING {error}, so the run goes on without it")
        else:
            self._committing = spawn(self._commit(step, began))

    async def _commit(self, step: int, began: float) -> None:
        try:
            await asyncio.to_thread(self._checkpoints.commit, step)
        except CheckpointError as error:
            self._parts.log.progress.note(f"WARNING {error}, so the run goes on without it")
        else:
            self.saved = step
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
