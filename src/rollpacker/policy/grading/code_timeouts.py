"""How long code may run (RollPacker, section 4.3): timeouts follow the test case.

What is decided here is acted upon by the drivers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from rollpacker.config import CodeTimeoutConfig


class AdaptiveTimeouts:
    """A timeout for each test case, from the correct responses to it so far.

    Args:
        config: ``T = min(max(least_s, factor * anchor), most_s)``, in CPU seconds; not adaptive
            ones are ``most_s``.
        at_once: a correct response counts from when it is graded, as in the paper. Otherwise
            from the next step, so that rewards do not depend on the order of grading.
        cases: test cases remembered; the least recently seen are forgotten.
    """

    def __init__(
        self, config: CodeTimeoutConfig, *, at_once: bool = True, cases: int = 1_000_000
    ) -> None:
        self._config = config
        self._at_once = at_once
        self._cases = cases
        self._anchors: OrderedDict[str, float] = OrderedDict()
        self._later: dict[str, float] = {}

    def timeout(self, case: str) -> float:
        """Seconds that a response may take on this test case."""
        rules = self._config
        anchor = self._anchors.get(case)
        if anchor is None or not rules.adaptive:
            return rules.most_s
        return min(max(rules.least_s, rules.factor * anchor), rules.most_s)

    def observe(self, case: str, seconds: float, correct: bool) -> None:
        """Take the time of one response on one test case; only correct ones count."""
        if not correct:
            return
        if self._at_once:
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
        if len(self._anchors) > self._cases:
            self._anchors.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """Longest correct times by test case, as JSON."""
        return {"anchors": list(self._anchors.items()), "later": dict(self._later)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``."""
        self._anchors = OrderedDict((case, seconds) for case, seconds in state["anchors"])
        self._later = dict(state["later"])
