"""Your own mode of tail batching: ``rollout.tail_batching.mode: path/to/file.py:Name``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, NoReturn

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
        accepted: groups for training so far, all graded.
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
    """Decides how far a round over-provisions, and when it ends. The base of your own modes.

    The same object drives runs, the simulator and ``estimate``. A rule has no clock, and no
    randomness except from the step's number, so that a journal replays. ``tail`` is the section
    ``rollout.tail_batching``.
    """

    def __init__(self, tail: TailBatchingConfig) -> None:
        self.tail = tail

    def start(self, step: int, lengths: LengthHistory) -> Racing:
        """How far the step's round over-provisions. ``lengths`` are those of earlier steps."""
        del step, lengths
        return Racing()

    def ends(self, round: RoundView) -> bool:
        """Whether a short round ends now, asked after each event of an attempt once a group is
        accepted. Prompts that still decode wait for a long round. Groups whose responses have all
        ended are graded and trained on."""
        del round
        return False

    def state_dict(self) -> dict[str, Any]:
        """The rule's memory from step to step, as JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict``."""


_KEY = "rollout.tail_batching.mode"


class OwnRule:
    """The rule that the mode names. Its mistakes raise ``ValueError`` with the key's name."""

    def __init__(self, tail: TailBatchingConfig) -> None:
        self._mode = tail.mode
        made = find(tail.mode, _KEY)
        if not (isinstance(made, type) and issubclass(made, TailRule)):
            raise ValueError(
                f"{_KEY}: '{tail.mode}' must be a subclass of "
                "rollpacker.policy.rounds.rule.TailRule"
            )
        self._can_end = made.ends is not TailRule.ends
        self._rule: Any = self._asked("__init__", lambda: made(tail))

    def start(self, step: int, lengths: LengthHistory) -> Racing:
        """See ``TailRule``. Factors below 1 are refused, as a round would wait for incomplete
        groups for ever."""
        racing = self._asked("start", lambda: self._rule.start(step, lengths))
        if not isinstance(racing, Racing):
            self._refuse("start", f"returns a {type(racing).__name__} instead of a Racing")
        if not (1.0 <= racing.eta_prompts < inf and 1.0 <= racing.eta_responses < inf):
            self._refuse("start", f"returns {racing}: both factors must be at least 1")
        if racing.stops and not self._can_end:
            self._refuse("start", "returns stops=True, but the class has no method 'ends'")
        return racing

    def ends(self, round: RoundView) -> bool:
        return bool(self._asked("ends", lambda: self._rule.ends(round)))

    def state_dict(self) -> dict[str, Any]:
        """A copy, as the rule goes on before the state is saved."""
        return self._asked("state_dict", lambda: json.loads(json.dumps(self._rule.state_dict())))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._asked("load_state_dict", lambda: self._rule.load_state_dict(state))

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except Exception as error:  # the user's code runs
            raise ValueError(f"{_KEY}: {what} of '{self._mode}' failed: {told(error)}") from error

    def _refuse(self, what: str, why: str) -> NoReturn:
        raise ValueError(f"{_KEY}: {what} of '{self._mode}' {why}")


def own_rule(tail: TailBatchingConfig) -> OwnRule | None:
    """The rule that the mode names. None for a built-in mode. Raises ``ValueError``."""
    return OwnRule(tail) if tail.own else None
