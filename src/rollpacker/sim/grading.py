"""When rewards come back in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from rollpacker.core.types import AttemptId
from rollpacker.policy.reward_timeouts import AdaptiveTimeouts
from rollpacker.sim.agenda import Agenda
from rollpacker.sim.costs import RewardCosts
from rollpacker.sim.judge import Judge

RewardKind = Literal["none", "math", "code", "judge"]


@dataclass(slots=True)
class _Job:
    attempt: AttemptId
    kind: RewardKind
    case: str
    run_s: float


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
        kind = self._kinds.get(domain, "none")
        self._wanted.add(attempt)
        job = _Job(attempt, kind, case, run_s)
        match kind:
            case "none":
                self._after(0.0, job)
            case "math":
                self._after(self._costs.math_s, job)
            case "code":
                self._after(min(run_s, self._timeouts.timeout(case)), job)
            case "judge":
                self._judge.submit(attempt)

    def reload(self) -> None:
        """More or fewer devices are busy than before."""
        self._judge.reload()

    def _after(self, seconds: float, job: _Job) -> None:
        self._agenda.after(seconds, lambda: self._finish(job))

    def _finish(self, job: _Job) -> None:
        if job.kind == "code" and job.attempt in self._wanted:
            # A program that ends in time counts as correct: rewards are not modelled by content.
            correct = job.run_s <= self._timeouts.timeout(job.case)
            self._timeouts.observe(job.case, job.run_s, correct)
        self._graded(job.attempt)

    def _graded(self, attempt: AttemptId) -> None:
        if attempt in self._wanted:
            self._wanted.discard(attempt)
            self._on_graded(attempt)

    def cancel(self, attempt: AttemptId) -> None:
        """Forget an attempt; unknown ones are ignored."""
        self._wanted.discard(attempt)
