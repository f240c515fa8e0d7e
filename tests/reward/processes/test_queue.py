"""The queue of the pool under any order of events: nothing is lost, doubled or called too often."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pool_helpers import requests

from rollpacker.config import RewardConfig
from rollpacker.core.types import AttemptId
from rollpacker.reward.processes.ledger import GraderReply, ScoreLedger
from rollpacker.reward.processes.process import GradingJob
from rollpacker.reward.processes.queue import Waiting

REWARDS = [
    RewardConfig(function="math", name="a"),
    RewardConfig(function="math", name="b", batch=3),
    RewardConfig(function="rg", name="c"),
    RewardConfig(function="rg", name="d", batch=5, domains=["default"]),
]
RETRIES = 1


class Queue(RuleBasedStateMachine):
    """Two processes that answer, fail and die, as the pool drives them."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ScoreLedger(REWARDS)
        self.waiting = Waiting(REWARDS, self.ledger, RETRIES, join=True)
        self.running: dict[str, list[GradingJob]] = {"x": [], "y": []}
        self.next = 0
        self.gone: set[int] = set()
        self.failures: Counter[tuple[int, int]] = Counter()
        self.failed_in: dict[tuple[int, int], str] = {}
        self.sent_ids: set[int] = set()

    @rule(count=st.integers(0, 7))
    def submit(self, count: int) -> None:
        self.waiting.add(requests(["1"] * count, first=self.next))
        self.next += count

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if held := sorted(self.ledger.pending()):
            attempt = data.draw(st.sampled_from(held))
            self.ledger.drop(attempt)
            self.gone.add(attempt)

    @rule(process=st.sampled_from("xy"), count=st.integers(1, 6))
    def take(self, process: str, count: int) -> None:
        if self.running[process]:
            return
        jobs = [job for job, _ in self.waiting.take(process, count, self.running)]
        assert len(jobs) <= count
        for job in jobs:
            sizes = [REWARDS[function].call_size for function in job.functions]
            for key in self._keys(job):
                assert self.failures[key] == job.failures
                assert self.failed_in.get(key) != process
            assert 1 <= len(job.requests) <= min(sizes)
            assert len(sizes) == 1 or max(sizes) == 1
            assert all(request.attempt in self.ledger.pending() for request in job.requests)
            if job.failures or sizes[0] > 1:
                assert len(jobs) == 1
            if job.failures:
                assert len(job.requests) == 1
            assert job.id not in self.sent_ids or job.failures or sizes == [1, 1]
            self.sent_ids.add(job.id)
        self.running[process] = jobs
        if len(jobs) == 1 and not jobs[0].failures:
            self._is_full(jobs[0])

    def _keys(self, job: GradingJob) -> list[tuple[int, int]]:
        """What is charged: the calls of a and c are of one job, whose failures count together."""
        function = job.functions[0] if job.functions[0] % 2 else 0
        return [(request.attempt, function) for request in job.requests]

    def _is_full(self, job: GradingJob) -> None:
        """What is left for the same function could not have been joined."""
        size = REWARDS[job.functions[0]].call_size
        if 1 < size > len(job.requests):
            alike = [
                each
                for each in self.waiting._jobs
                if each.functions == job.functions and not each.failures
            ]
            assert not any(self.ledger.wanted(each) for each in alike)

    @rule(process=st.sampled_from("xy"))
    def answer(self, process: str) -> None:
        if jobs := self.running[process]:
            job, function = jobs[0], jobs[0].functions.pop(0)
            if not job.functions:
                jobs.pop(0)
            self.ledger.score(job, function, GraderReply(scores=(1.0,) * len(job.requests)))

    @rule(process=st.sampled_from("xy"), dies=st.booleans())
    def fail(self, process: str, dies: bool) -> None:
        if jobs := self.running[process]:
            job = jobs.pop(0)
            if dies:
                self.waiting.put_back(jobs)
                self.running[process] = []
            for key in self._keys(job):
                self.failures[key] += 1
                self.failed_in[key] = process
            self.waiting.charge(job, "no", process, "no")

    @invariant()
    def every_held_attempt_waits_once_for_each_missing_call(self) -> None:
        waits: Counter[tuple[AttemptId, int]] = Counter()
        for job in [*self.waiting._jobs, *self.running["x"], *self.running["y"]]:
            for request in job.requests:
                for function in job.functions:
                    waits[request.attempt, function] += 1
        held = self.ledger.pending()
        assert all(count == 1 for key, count in waits.items() if key[0] in held)
        scored = {attempt: self.ledger._held[attempt].scores for attempt in held}
        for attempt, scores in scored.items():
            missing = {function for function in range(len(REWARDS)) if (attempt, function) in waits}
            assert missing == set(range(len(REWARDS))) - set(scores)

    @invariant()
    def a_grade_comes_once_and_fails_after_its_tries(self) -> None:
        done = Counter(grade.attempt for grade in self.ledger.done)
        assert all(count == 1 for count in done.values())
        assert len(done) + len(self.ledger.pending()) + len(self.gone) == self.next
        for grade in self.ledger.done:
            worst = max((self.failures[grade.attempt, f] for f in range(len(REWARDS))), default=0)
            assert (grade.reward is None) == (worst > RETRIES)


TestQueue = Queue.TestCase
TestQueue.settings = settings(stateful_step_count=50)


def test_the_seconds_of_a_call_are_shared_by_its_responses() -> None:
    ledger = ScoreLedger(REWARDS[:2])
    job = GradingJob(1, tuple(requests(["1"] * 16)), [1])
    for request in job.requests:
        ledger.hold(request.attempt, 2)
    for request in job.requests:
        alone = GradingJob(2, (request,), [0])
        ledger.score(alone, 0, GraderReply(scores=(1.0,), seconds=0.25))
    ledger.score(job, 1, GraderReply(scores=(1.0,) * 16, seconds=8.0))
    assert sum(grade.seconds for grade in ledger.done) == 16 * 0.25 + 8.0
