"""From finished attempts to grades: decoding, and the pool of reward processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.data.base import Row
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.pool import GradingPool
from rollpacker.runtime.attempts import Attempt


class Rewards:
    """Grades attempts in processes that may die; results come by ``on_grades``."""

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        config: GradingConfig,
        tokenizer: Any,
    ) -> None:
        self._pool = GradingPool(rewards, config)
        # The wrapper of transformers costs more than the decoding itself.
        self._decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
        self.on_grades: Callable[[Sequence[Grade]], None] = lambda _grades: None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the processes. Raises ``ValueError`` when a function cannot be used."""
        self._pool.wait_ready()
        self._pool.attach(loop, lambda grades: self.on_grades(grades))

    @property
    def needs_group(self) -> bool:
        """Whether the responses of a prompt must be graded together."""
        return self._pool.needs_group

    def grade(self, attempts: Sequence[Attempt], rows: Mapping[PromptId, Row]) -> None:
        """Start grading; never waits. With ``needs_group``, one prompt's responses a call."""
        requests = [self._request(attempt, rows[attempt.prompt]) for attempt in attempts]
        self._pool.submit(requests, group=self._pool.needs_group)

    def _request(self, attempt: Attempt, row: Row) -> GradeRequest:
        assert attempt.output is not None
        ids = attempt.output.tokens.tolist()
        return GradeRequest(
            attempt=attempt.id,
            prompt=row.prompt,
            completion=self._decode(ids, skip_special_tokens=True),
            completion_ids=ids,
            row=row.columns,
        )

    def cancel(self, attempt: AttemptId) -> None:
        """Forget an attempt; its result, if it comes, is dropped."""
        self._pool.cancel([attempt])

    def pending(self) -> dict[AttemptId, float]:
        """What is being waited for, and for how many seconds."""
        return self._pool.pending()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
