"""A mode of tail batching of one's own: ``rollout.tail_batching.mode: path/to/file.py:Name``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from rollpacker.config import TailBatchingConfig
from rollpacker.errors import told
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


_KEY = "rollout.tail_batching.mode"


def own_rule(tail: TailBatchingConfig) -> TailRule | None:
    """The rule that the mode names; None for a mode of ours. Raises ``ValueError``."""
    if not tail.own:
        return None
    made = find(tail.mode, _KEY)
    if not (isinstance(made, type) and issubclass(made, TailRule)):
        raise ValueError(
            f"{_KEY}: '{tail.mode}' is no subclass of rollpacker.policy.rounds.rule.TailRule"
        )
    try:
        return made(tail)
    except Exception as error:  # the user's code runs
        raise ValueError(f"{_KEY}: '{tail.mode}' cannot be made: {told(error)}") from error


def racing_of(rule: TailRule, step: int, lengths: LengthHistory) -> Racing:
    """How far the rule lets a round over-provision.

    Raises ``ValueError`` for any other answer: a round that starts fewer responses than a group has
    would wait for that group for ever.
    """
    racing = cast(Any, rule).start(step, lengths)
    if not isinstance(racing, Racing):
        wrong = f"returns a {type(racing).__name__}, no Racing"
    elif not (1.0 <= racing.eta_prompts < inf and 1.0 <= racing.eta_responses < inf):
        wrong = f"returns {racing}: eta_prompts and eta_responses must be at least 1"
    else:
        return racing
    raise ValueError(f"{_KEY}: start of '{rule.tail.mode}' {wrong}")


def state_of(rule: TailRule) -> dict[str, Any]:
    """A copy of what the rule remembers: it goes on while the state waits, and a step that is
    dropped is kept as it began.

    Raises ``ValueError`` where it is no JSON.
    """
    try:
        return json.loads(json.dumps(rule.state_dict()))
    except (TypeError, ValueError) as error:
        wrong = f"state_dict of '{rule.tail.mode}' gives no JSON: {told(error)}"
        raise ValueError(f"{_KEY}: {wrong}") from error
