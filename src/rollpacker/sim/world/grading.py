"""When rewards come back in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from rollpacker.core.types import AttemptId
from rollpacker.policy.rewards.reward_timeouts import AdaptiveTimeouts
from rollpacker.sim.costs.costs import RewardCosts
from rollpacker.sim.world.agenda import Agenda
from rollpacker.sim.world.judge import Judge

RewardKind = Literal["none", "math", "code", "judge"]


class Grading:
    """Reward services that run beside the rollout.

    Math and code have as many processes as they need; the judge has ``judge_slots`` and is slow
    while its devices work.

    Args:
        agenda: time.
        costs: seconds of a reward by kind.
        kinds: kind of each domain's reward.
        timeouts: decides how long a program may run.
        load: share of the devices that decode or train now, 0 to 1.
        on_graded: takes an attempt whose reward has come.
    """

    def __init__(
        self,
        agenda: Agenda,
        costs: RewardCosts,
        kinds: Mapping[str, RewardKind],
        timeouts: AdaptiveTimeouts,
        *,
        load: Callable[[], float],
        on_graded: Callable[[AttemptId], None],
    ) -> None:
        self._agenda = agenda
        self._costs = costs
        self._kinds = dict(kinds)
        self._timeouts = timeouts
        self._on_graded = on_graded
        self._wanted: set[AttemptId] = set()
        self._judge = Judge(
            agenda,
            costs,
            load=load,
            wanted=self._wanted.__contains__,
            on_judged=self._graded,
        )

    def submit(self, attempt: AttemptId, domain: str, case: str, run_s: float) -> None:
        """Grade a response; its program (code only) would take ``run_s`` on the test ``case``."""
        self._wanted.add(attempt)
        match self._kinds.get(domain, "none"):
            case "none":
                self._agenda.after(0.0, lambda: self._graded(attempt))
            case "math":
                self._agenda.after(self._costs.math_s, lambda: self._graded(attempt))
            case "code":
                seconds = min(run_s, self._timeouts.timeout(case))
                self._agenda.after(seconds, lambda: self._ran(attempt, case, run_s))
            case "judge":
                self._judge.submit(attempt)

    def reload(self) -> None:
        """More or fewer devices are busy than before."""
        self._judge.reload()

    def _ran(self, attempt: AttemptId, case: str, run_s: float) -> None:
        if attempt in self._wanted:
            # A program that ends in time counts as correct: rewards are not modelled by content.
            self._timeouts.observe(case, run_s, run_s <= self._timeouts.timeout(case))
        self._graded(attempt)

    def _graded(self, attempt: AttemptId) -> None:
        if attempt in self._wanted:
            self._wanted.discard(attempt)
            self._on_graded(attempt)

    def cancel(self, attempt: AttemptId) -> None:
        """Forget an attempt; unknown ones are ignored."""
        self._wanted.discard(attempt)
