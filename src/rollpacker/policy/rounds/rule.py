"""A mode of tail batching of one's own: ``rollout.tail_batching.mode: path/to/file.py:Name``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.config import TailBatchingConfig
from rollpacker.policy.lengths import LengthHistory
from rollpacker.policy.rounds.race import Racing
from rollpacker.user_code import find


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """A short round in progress.

    Args:
        step: number of the step, from 0.
        accepted: groups that the step trains on so far.
        wanted: groups of a whole step (``rollout.prompts_per_step``).
        decoding: attempts that engines decode.
        longest: tokens of the longest response that has ended in this round.
    """

    step: int
    accepted: int
    wanted: int
    decoding: int
    longest: int


class TailRule:
    """Decides how far a round over-provisions, and when it ends; the base of modes of one's own.

    The same object drives runs, the simulator and ``estimate``. A rule has no clock and no
    randomness but of the step's number, so that a journal replays.

    Args:
        tail: the section ``rollout.tail_batching``.
    """

    def __init__(self, tail: TailBatchingConfig) -> None:
        self.tail = tail

    def start(self, step: int, lengths: LengthHistory) -> Racing:
        """How far the step's round over-provisions; ``lengths`` are those of earlier steps."""
        del step, lengths
        return Racing()

    def ends(self, round: RoundView) -> bool:
        """Whether a short round ends now, once a group is accepted.

        It is asked after each event of an attempt. Prompts that still decode wait for a long
        round. Groups whose responses have all ended are graded and trained on.
        """
        del round
        return False

    def state_dict(self) -> dict[str, Any]:
        """What the rule remembers from step to step, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave."""


def own_rule(tail: TailBatchingConfig) -> TailRule | None:
    """The rule that the mode names; None for a mode of ours. Raises ``ValueError``."""
    if not tail.own:
        return None
    key = "rollout.tail_batching.mode"
    made = find(tail.mode, key)
    if not (isinstance(made, type) and issubclass(made, TailRule)):
        raise ValueError(
            f"{key}: '{tail.mode}' is no subclass of rollpacker.policy.rounds.rule.TailRule"
        )
    return made(tail)
