"""When a run measures its accuracy on held-out problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollpacker.config import EvalConfig
from rollpacker.job.run.checkpoint_manager import CheckpointManager
from rollpacker.job.run.stopping import Stopping
from rollpacker.runtime.evaluate import Evaluator
from rollpacker.runtime.record.metrics import Counters
from rollpacker.runtime.step.step import DroppedError


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
