"""Simulate rewards and their delays, including a judge that shares its devices among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from typing import Literal

from rollpacker.core.types import AttemptId
from rollpacker.policy.grading import AdaptiveTimeouts
from rollpacker.sim.costs.costs import RewardCosts
from rollpacker.sim.world.agenda import Agenda

_CLOSE = 1e-9


class SimulatedJudge:
    """Judges up to ``judge_slots`` responses at once, all at the speed that the present load
    allows. ``load``: share of busy devices, 0 to 1. ``wanted``: whether a response still needs
    its judgement."""

    def __init__(
        self,
        agenda: Agenda,
        costs: RewardCosts,
        *,
        load: Callable[[], float],
        wanted: Callable[[AttemptId], bool],
        on_judged: Callable[[AttemptId], None],
    ) -> None:
        self._agenda = agenda
        self._costs = costs
        self._load = load
        self._wanted = wanted
        self._on_judged = on_judged
        self._waiting: deque[AttemptId] = deque()
        self._judging: list[tuple[float, int, AttemptId]] = []
        self._count = 0
        self._done = 0.0  # judgements that a permanently busy slot would have finished
        self._rate = 1.0 / costs.judged_s(0.0)
        self._since = 0.0
        self._planned = 0

    def submit(self, attempt: AttemptId) -> None:
        self._waiting.append(attempt)
        self._fill()
        self._plan()

    def reload(self) -> None:
        if not self._judging:
            return
        rate = 1.0 / self._costs.judged_s(self._load())
        if rate != self._rate:
            self._advance()
            self._rate = rate
            self._plan()

    def _advance(self) -> None:
        now = self._agenda.now
        self._done += self._rate * (now - self._since)
        self._since = now

    def _fill(self) -> None:
        self._advance()
        while self._waiting and len(self._judging) < self._costs.judge_slots:
            attempt = self._waiting.popleft()
            if self._wanted(attempt):
                self._count += 1
                heappush(self._judging, (self._done + 1.0, self._count, attempt))
        if self._judging:
            self._rate = 1.0 / self._costs.judged_s(self._load())

    def _plan(self) -> None:
        self._planned += 1
        if self._judging:
            left = max(0.0, self._judging[0][0] - self._done)
            plan = self._planned
            self._agenda.after(left / self._rate, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._planned:
            return
        self._advance()
        ended: list[AttemptId] = []
        while self._judging and self._judging[0][0] <= self._done + _CLOSE:
            ended.append(heappop(self._judging)[2])
        for attempt in ended:
            self._on_judged(attempt)
        self._fill()
        self._plan()


RewardKind = Literal["none", "math", "code", "judge"]


class SimulatedGrading:
    """Reward services that run beside the rollout. Math and code have as many processes as they
    need. The judge has ``judge_slots``, and is slow while its devices work. ``load``: share of
    busy devices, 0 to 1."""

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
        self._judge = SimulatedJudge(
            agenda,
            costs,
            load=load,
            wanted=self._wanted.__contains__,
            on_judged=self._graded,
        )

    def submit(self, attempt: AttemptId, domain: str, case: str, run_s: float) -> None:
        """Grade a response. Its program (code only) would take ``run_s`` on the test ``case``."""
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
        self._wanted.discard(attempt)
