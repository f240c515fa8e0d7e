"""When rewards come back: kinds, judge slots, cancelling."""

import math
import random

import pytest

from rollpacker.config import CodeTimeoutConfig
from rollpacker.core.types import AttemptId
from rollpacker.policy.grading import AdaptiveTimeouts
from rollpacker.sim.costs.costs import RewardCosts
from rollpacker.sim.world.agenda import Agenda
from rollpacker.sim.world.grading import SimulatedGrading

COSTS = RewardCosts(math_s=0.5, judge_s=8.0, judge_idle=0.25, judge_slots=3)
KINDS = {"maths": "math", "programs": "code", "essays": "judge"}


class Service:
    """Grades on an agenda and notes when each reward came."""

    def __init__(self, load: float = 1.0) -> None:
        self.agenda = Agenda()
        self.load = load
        self.came: dict[int, float] = {}
        self.grading = SimulatedGrading(
            self.agenda,
            COSTS,
            KINDS,
            AdaptiveTimeouts(CodeTimeoutConfig()),
            load=lambda: self.load,
            on_graded=self.note,
        )

    def note(self, attempt: AttemptId) -> None:
        assert attempt not in self.came
        self.came[attempt] = self.agenda.now

    def submit(self, attempt: int, domain: str, run_s: float = 0.0, case: str = "case") -> None:
        self.grading.submit(AttemptId(attempt), domain, case, run_s)

    def run(self) -> dict[int, float]:
        while self.agenda.run_next():
            pass
        return self.came


def test_each_kind_takes_its_time() -> None:
    service = Service()
    service.submit(0, "maths")
    service.submit(1, "programs", run_s=4.0)
    service.submit(2, "essays")
    service.submit(3, "unheard of")
    assert service.run() == {3: 0.0, 0: 0.5, 1: 4.0, 2: 8.0}


def test_the_judge_is_faster_on_idle_devices() -> None:
    service = Service(load=0.0)
    service.submit(0, "essays")
    assert service.run() == {0: 2.0}


def test_the_judge_has_done_its_work_so_far_at_the_speed_of_then() -> None:
    service = Service()
    service.submit(0, "essays")

    def rest() -> None:
        service.load = 0.0
        service.grading.reload()

    service.agenda.at(4.0, rest)
    assert service.run() == {0: 5.0}


def test_a_program_that_hangs_is_killed_sooner_once_a_correct_one_was_seen() -> None:
    service = Service()
    service.submit(0, "programs", run_s=math.inf)
    assert service.run() == {0: 30.0}
    service.submit(1, "programs", run_s=4.0)
    service.run()
    service.submit(2, "programs", run_s=math.inf)
    service.submit(3, "programs", run_s=math.inf, case="other")
    came = service.run()
    assert came[2] - came[1] == pytest.approx(1.5 * 4.0)
    assert came[3] - came[1] == pytest.approx(30.0)


def test_the_judge_serves_in_order_and_never_more_than_its_slots() -> None:
    service = Service()
    for attempt in range(8):
        service.submit(attempt, "essays")
    came = service.run()
    assert came == {attempt: 8.0 * (1 + attempt // 3) for attempt in range(8)}


def test_what_is_cancelled_never_comes_and_waiting_work_takes_no_slot() -> None:
    service = Service()
    for attempt in range(7):
        service.submit(attempt, "essays")
    for attempt in (0, 3, 4, 99):
        service.grading.cancel(AttemptId(attempt))
    # Attempt 0 is being judged and keeps its slot to the end; 3 and 4 waited.
    assert service.run() == {1: 8.0, 2: 8.0, 5: 16.0, 6: 16.0}


def test_random_orders_and_cancellations() -> None:
    numbers = random.Random(5)
    service = Service()
    cancelled: set[int] = set()
    for attempt in range(300):
        at = numbers.uniform(0.0, 200.0)
        service.agenda.at(at, lambda attempt=attempt: service.submit(attempt, "essays"))
        if numbers.random() < 0.3:
            cancelled.add(attempt)
            service.agenda.at(at, lambda attempt=attempt: service.grading.cancel(attempt))
    came = service.run()
    assert set(came) == set(range(300)) - cancelled
    times = sorted(came.values())
    # Three slots of 8 s: no window of less than 8 s may see more than three ends.
    assert all(late - early >= 8.0 - 1e-9 for early, late in zip(times, times[3:], strict=False))
