"""When a run stops whose steps dynamic sampling leaves empty.

One such step may be bad luck. Several in a row are problems that the model always solves, or never,
or rewards that do not tell responses apart: going on costs as much as training and teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollpacker.config import DynamicSamplingConfig


class EmptySteps:
    """Counts them.

    Args:
        config: whether there is dynamic sampling, and how many in a row are too many.
    """

    def __init__(self, config: DynamicSamplingConfig) -> None:
        self._most = config.max_empty_steps if config.enabled else 0
        self.in_a_row = 0

    def too_many(self, groups: int) -> bool:
        """A step has ended with so many groups; whether the run is to end."""
        self.in_a_row = 0 if groups else self.in_a_row + 1
        return 0 < self._most <= self.in_a_row

    def state_dict(self) -> dict[str, int]:
        """How many there were in a row, as JSON."""
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Count on."""
        self.in_a_row = state["in_a_row"]

    def __str__(self) -> str:
        which = f"{self.in_a_row} steps in a row" if self.in_a_row > 1 else "a step"
        return (
            f"dynamic sampling has left {which} without a group to train on, since no prompt's "
            "rewards differ: check 'rewards', take problems of another "
            "difficulty, or raise rollout.dynamic_sampling.max_empty_steps (0: never stop)"
        )
