"""How long code may run (RollPacker, section 4.3): timeouts follow the test case.

What is decided here is acted upon by the drivers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutSettings:
    """``T = min(max(least, factor * anchor), most)``, in CPU seconds.

    Args:
        factor: over the longest time of a correct response.
        least: shortest timeout.
        most: longest timeout, and the one before any correct response.
        at_once: a correct response counts from when it is graded, as in the paper. Otherwise
            from the next step, so that rewards do not depend on the order of grading.
        cases: test cases remembered; the least recently seen are forgotten.
    """

    factor: float = 1.5
    least: float = 2.0
    most: float = 30.0
    at_once: bool = True
    cases: int = 1_000_000

    def __post_init__(self) -> None:
        if not (self.factor >= 1.0 and 0.0 < self.least <= self.most < math.inf):
            raise ValueError(
                "an adaptive timeout needs factor >= 1 and 0 < least <= most, got "
                f"factor={self.factor}, least={self.least}, most={self.most}"
            )


class AdaptiveTimeouts:
    """A timeout for each test case, from the correct responses to it so far."""

    def __init__(self, settings: TimeoutSettings) -> None:
        self._settings = settings
        self._anchors: OrderedDict[str, float] = OrderedDict()
        self._later: dict[str, float] = {}

    def timeout(self, case: str) -> float:
        """Seconds that a response may take on this test case."""
        rules = self._settings
        anchor = self._anchors.get(case)
        if anchor is None:
            return rules.most
        return min(max(rules.least, rules.factor * anchor), rules.most)

    def observe(self, case: str, seconds: float, correct: bool) -> None:
        """Take the time of one response on one test case; only correct ones count."""
        if not correct:
            return
        if self._settings.at_once:
            self._raise(case, seconds)
        else:
            self._later[case] = max(seconds, self._later.get(case, 0.0))

    def advance(self) -> None:
        """A step is over: what waited for its end counts from now on."""
        for case in sorted(self._later):
            self._raise(case, self._later[case])
        self._later.clear()

    def _raise(self, case: str, seconds: float) -> None:
        self._anchors[case] = max(seconds, self._anchors.get(case, 0.0))
        self._anchors.move_to_end(case)
        if len(self._anchors) > self._settings.cases:
            self._anchors.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """Longest correct times by test case, as JSON."""
        return {"anchors": list(self._anchors.items()), "later": dict(self._later)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._anchors = OrderedDict((case, seconds) for case, seconds in state["anchors"])
        self._later = dict(state["later"])
