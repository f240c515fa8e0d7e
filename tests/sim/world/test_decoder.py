"""The event-driven decoder against one that decodes token by token."""

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.sim.costs.costs import (
    ADMIT_SHARE,
    BLOCK_SLACK,
    PLAIN,
    Ahead,
    EngineCosts,
    GpuCosts,
    Rule,
    ahead_terms,
)
from rollpacker.sim.costs.hardware import DEVICES
from rollpacker.sim.costs.models import MODELS
from rollpacker.sim.workload.workload import SimulatedRequest
from rollpacker.sim.world.decoder import Decoder

GPU = GpuCosts(device=DEVICES["H800"], shape=MODELS["Qwen2.5-14B"])


@dataclass(frozen=True)
class Affine:
    """Costs with any KV budget."""

    capacity: float = 1e9
    slack: float = 8.0
    slope: float = 2e-8

    def step_s(self, batch: int, context_tokens: float) -> float:
        return 5e-3 + 1e-4 * batch + self.slope * context_tokens

    def prefill_s(self, tokens: float) -> float:
        return 2e-5 * tokens

    def drafts_s(self, batch: int, drafted: int, ahead: Ahead) -> float:
        return ahead.row_s * drafted


Action = tuple[float, SimulatedRequest | int]
"""A submission, or the abort of an attempt."""


@dataclass
class Outcome:
    finished: list[tuple[int, int, float]] = field(default_factory=list)
    aborted: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0
    end: float = 0.0
    peak: int = 0


class Naive:
    """One decode step at a time; with ``blocks``, whole 16-token blocks instead of the slack."""

    def __init__(
        self, costs: EngineCosts, max_running: int, actions: list[Action], blocks: bool
    ) -> None:
        self.costs, self.max_running, self.blocks = costs, max_running, blocks
        self.actions = list(actions)
        self.queue: list[SimulatedRequest] = []
        self.batch: list[SimulatedRequest] = []
        self.tokens: dict[int, int] = {}
        self.held: dict[str, set[int]] = {}
        self.prefilled: set[str] = set()
        self.now = 0.0
        self.out = Outcome()

    def context(self) -> int:
        return sum(r.prompt_tokens + self.tokens[r.attempt] for r in self.batch)

    def used(self, more: int = 0) -> int:
        if not self.blocks:
            return self.context() + (BLOCK_SLACK + more) * len(self.batch)
        held = (r.prompt_tokens + self.tokens[r.attempt] + more for r in self.batch)
        return sum(-(-tokens // 16) * 16 for tokens in held)

    def release(self, request: SimulatedRequest) -> None:
        self.held[request.group].discard(request.attempt)
        if not self.held[request.group]:
            self.prefilled.discard(request.group)

    def apply(self, until: float, stepped: bool, strictly: bool) -> bool:
        """Take the actions up to ``until``; whether one may change what runs."""
        changed = False
        while self.actions and (self.actions[0][0] < until or not strictly):
            if self.actions[0][0] > until:
                break
            at, what = self.actions.pop(0)
            if isinstance(what, SimulatedRequest):
                changed |= not self.queue
                self.queue.append(what)
                self.tokens[what.attempt] = what.generated
                self.held.setdefault(what.group, set()).add(what.attempt)
            else:
                changed |= self.abort(what, stepped and at < until)
        return changed

    def abort(self, attempt: int, in_flight: bool) -> bool:
        for requests in (self.batch, self.queue):
            for request in requests:
                if request.attempt == attempt:
                    requests.remove(request)
                    lost = in_flight and requests is self.batch
                    self.out.aborted[attempt] = self.tokens[attempt] - lost
                    self.release(request)
                    return True
        return False

    def preempt(self) -> bool:
        preempted = False
        while len(self.batch) > 1 and self.used(1) > self.costs.capacity:
            self.queue.insert(0, self.batch.pop())
            self.out.preemptions += 1
            preempted = True
        return preempted

    def admit(self) -> float:
        prefill = 0
        while self.queue and len(self.batch) < self.max_running:
            request = self.queue[0]
            need = request.prompt_tokens + self.tokens[request.attempt]
            room = -(-need // 16) * 16 if self.blocks else need
            if self.batch and self.used() + room > ADMIT_SHARE * self.costs.capacity:
                break
            self.batch.append(self.queue.pop(0))
            if self.tokens[request.attempt] or request.group not in self.prefilled:
                prefill += need
            self.prefilled.add(request.group)
        self.out.peak = max(self.out.peak, self.context())
        return self.costs.prefill_s(prefill)

    def step(self) -> None:
        batch = len(self.batch)
        self.now += self.costs.step_s(batch, self.context() + batch / 2)
        for request in self.batch:
            self.tokens[request.attempt] += 1
        self.out.steps += 1
        self.out.peak = max(self.out.peak, self.context())
        self.apply(self.now, stepped=True, strictly=True)
        for request in list(self.batch):
            if self.tokens[request.attempt] == request.target_tokens:
                self.batch.remove(request)
                self.release(request)
                self.out.finished.append((request.attempt, request.target_tokens, self.now))

    def run(self) -> Outcome:
        while self.actions or self.queue or self.batch:
            if not self.queue and not self.batch:
                self.now = max(self.now, self.actions[0][0])
            self.apply(self.now, stepped=False, strictly=False)
            frozen = 0.0 if self.preempt() else self.admit()
            self.now += frozen
            if frozen and self.apply(self.now, stepped=False, strictly=False):
                continue
            if self.batch:
                self.step()
        self.out.end = self.now
        return self.out


def drive(costs: EngineCosts, max_running: int, actions: list[Action]) -> Outcome:
    decoder, out = Decoder(costs, max_running=max_running), Outcome()
    todo = list(actions)
    now = 0.0
    while True:
        due = decoder.next_event(now)
        if todo and (due is None or todo[0][0] < due):
            now = todo[0][0]
            while todo and todo[0][0] == now:
                what = todo.pop(0)[1]
                if isinstance(what, SimulatedRequest):
                    decoder.submit(now, what)
                else:
                    out.aborted |= decoder.abort(now, [what])
        elif due is not None:
            assert due >= now
            now = due
            out.finished += [(attempt, tokens, now) for attempt, tokens in decoder.advance(now)]
        else:
            break
    out.preemptions, out.steps = decoder.preemptions, decoder.decode_steps
    out.end, out.peak = now, decoder.peak_kv
    assert decoder.waiting == 0
    made = sum(tokens for _, tokens, _ in out.finished) + sum(out.aborted.values())
    elsewhere = sum(what.generated for _, what in actions if isinstance(what, SimulatedRequest))
    assert decoder.generated_tokens == made - elsewhere
    return out


def naive(
    costs: EngineCosts, max_running: int, actions: list[Action], blocks: bool = False
) -> Outcome:
    return Naive(costs, max_running, actions, blocks).run()


def assert_same(ours: Outcome, reference: Outcome) -> None:
    assert [each[:2] for each in ours.finished] == [each[:2] for each in reference.finished]
    for (_, _, at), (_, _, expected) in zip(ours.finished, reference.finished, strict=True):
        assert at == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert ours.aborted == reference.aborted
    assert ours.preemptions == reference.preemptions
    assert ours.peak == reference.peak


@st.composite
def workloads(draw: st.DrawFn, longest: int = 60, aborts: bool = True) -> list[Action]:
    count = draw(st.integers(1, 14))
    actions: list[Action] = []
    times = st.one_of(st.just(0.0), st.floats(0.0, 0.6))
    for attempt in range(count):
        at = draw(times)
        target = draw(st.integers(1, longest))
        request = SimulatedRequest(
            attempt=attempt,
            group=f"g{attempt // draw(st.integers(1, 4))}",
            prompt_tokens=draw(st.integers(1, 50)),
            target_tokens=target,
            generated=draw(st.one_of(st.just(0), st.integers(0, target - 1))),
        )
        actions.append((at, request))
        if aborts and draw(st.booleans()):
            actions.append((at + draw(st.floats(1e-4, 0.5)), attempt))
    return sorted(actions, key=lambda action: action[0])


@given(workloads(), st.integers(1, 16))
def test_equals_the_naive_decoder_under_races_and_aborts(
    actions: list[Action], max_running: int
) -> None:
    assert_same(drive(Affine(), max_running, actions), naive(Affine(), max_running, actions))


@given(workloads(), st.integers(1, 16), st.integers(118, 900))
def test_equals_the_naive_decoder_under_preemption(
    actions: list[Action], max_running: int, capacity: int
) -> None:
    costs = Affine(capacity=float(capacity))
    assert_same(drive(costs, max_running, actions), naive(costs, max_running, actions))


def round_of(seed: int, count: int, median: float, aborts: bool) -> list[Action]:
    """One rollout round: groups of 8, log-normal lengths, a fifth aborted on the way."""
    rng = random.Random(seed)
    actions: list[Action] = []
    for attempt in range(count):
        tokens = max(1, min(4096, int(median * rng.lognormvariate(0.0, 0.9))))
        actions.append((0.0, SimulatedRequest(attempt, f"p{attempt // 8}", 200, tokens)))
    if aborts:
        actions += [(rng.uniform(1.0, 20.0), attempt) for attempt in range(0, count, 5)]
    return sorted(actions, key=lambda action: action[0])


@pytest.mark.parametrize("aborts", [False, True])
def test_a_gpu_round_equals_the_naive_decoder(aborts: bool) -> None:
    actions = round_of(1, 60, 500.0, aborts)
    ours, reference = drive(GPU, 256, actions), naive(GPU, 256, actions)
    assert_same(ours, reference)
    assert ours.end == pytest.approx(reference.end, rel=1e-14)
    assert ours.preemptions == 0


def test_half_a_block_of_slack_stands_for_blocks() -> None:
    small = GpuCosts(device=replace(DEVICES["H800"], memory=44e9), shape=MODELS["Qwen2.5-14B"])
    counts = [0, 0]
    for seed in range(4):
        actions = round_of(seed, 80, 550.0, aborts=seed % 2 == 1)
        ours, blocks = drive(small, 256, actions), naive(small, 256, actions, blocks=True)
        assert ours.end == pytest.approx(blocks.end, rel=0.01)
        counts[0] += ours.preemptions
        counts[1] += blocks.preemptions
    assert counts[1] > 100
    assert counts[0] == pytest.approx(counts[1], rel=0.05)


def request(
    attempt: int, group: str = "g", tokens: int = 10, generated: int = 0
) -> SimulatedRequest:
    return SimulatedRequest(attempt, group, 100, tokens, generated)


def finish(decoder: Decoder, now: float) -> float:
    at = decoder.next_event(now)
    while at is not None:
        now = at
        decoder.advance(now)
        at = decoder.next_event(now)
    return now


def test_a_group_prefills_its_prompt_once_and_freezes_the_batch() -> None:
    decoder = Decoder(Affine(), max_running=8)
    for attempt in range(3):
        decoder.submit(0.0, request(attempt))
    alone = decoder.next_event(0.0)
    assert alone is not None
    assert decoder.busy_s == pytest.approx(100 * 2e-5)
    decoder.submit(0.01, request(3, "other", tokens=20))
    ends = decoder.next_event(decoder.pause(0.01))
    assert ends is not None
    assert ends > alone + 100 * 2e-5


def test_a_prompt_leaves_the_cache_with_its_last_request() -> None:
    decoder = Decoder(Affine(), max_running=8)
    decoder.submit(0.0, request(0))
    idle = finish(decoder, 0.0)
    decoder.submit(idle, request(1))
    before = decoder.busy_s
    decoder.next_event(idle)
    assert decoder.busy_s - before == pytest.approx(100 * 2e-5)


def test_a_migrated_request_recomputes_all_and_decodes_the_rest() -> None:
    source, target = Decoder(Affine(), max_running=8), Decoder(Affine(), max_running=8)
    source.submit(0.0, request(0, tokens=100))
    source.next_event(0.0)
    done = source.abort(0.2, [0, 99])
    assert 0 < done[0] < 100
    target.submit(0.2, request(0, tokens=100, generated=done[0]))
    target.next_event(0.2)
    assert target.busy_s == pytest.approx((100 + done[0]) * 2e-5)
    finish(target, 0.2)
    assert source.generated_tokens + target.generated_tokens == 100


def test_ties_finish_in_the_order_of_admission() -> None:
    decoder = Decoder(Affine(), max_running=8)
    for attempt in (5, 3, 4):
        decoder.submit(0.0, request(attempt))
    at = decoder.next_event(0.0)
    assert at is not None
    assert decoder.advance(at) == [(5, 10), (3, 10), (4, 10)]
    assert decoder.next_event(at) is None


def test_an_attempt_that_is_due_can_still_be_aborted() -> None:
    decoder = Decoder(Affine(), max_running=8)
    decoder.submit(0.0, request(0))
    at = decoder.next_event(0.0)
    assert at is not None
    assert decoder.abort(at, [0]) == {0: 10}
    assert decoder.advance(at) == []
    assert decoder.abort(at, [0]) == {}


def test_the_queue_waits_for_a_place_and_is_first_come() -> None:
    decoder = Decoder(Affine(), max_running=1)
    for attempt in range(4):
        decoder.submit(0.0, request(attempt))
    first = decoder.next_event(0.0)
    assert first is not None
    assert decoder.waiting == 3
    assert decoder.abort(first / 2, [1]) == {1: 0}
    order: list[int] = []
    at = decoder.next_event(first / 2)
    while at is not None:
        order += [attempt for attempt, _ in decoder.advance(at)]
        at = decoder.next_event(at)
    assert order == [0, 2, 3]


def test_busy_time_is_all_but_idle_time() -> None:
    decoder = Decoder(Affine(), max_running=4)
    decoder.submit(1.0, request(0))
    end = finish(decoder, 1.0)
    decoder.submit(end + 3.0, request(1))
    assert finish(decoder, end + 3.0) - 4.0 == pytest.approx(decoder.busy_s)
    assert decoder.decode_steps == 20


def test_requests_that_can_never_run_are_refused() -> None:
    decoder = Decoder(Affine(capacity=120.0), max_running=4)
    with pytest.raises(ValueError, match="needs 128 tokens of KV cache, the engine has 120"):
        decoder.submit(0.0, request(0, tokens=20))
    decoder.submit(0.0, request(1))
    with pytest.raises(ValueError, match="attempt 1 is already held"):
        decoder.submit(0.0, request(1))
    with pytest.raises(ValueError, match="target_tokens must exceed generated"):
        decoder.submit(0.0, request(2, generated=10))
    with pytest.raises(ValueError, match="max_running=0"):
        Decoder(Affine(), max_running=0)


def ahead(tokens: float, below: int = 8, row_cost: float = 0.0) -> Rule:
    return Rule(below, 16, 0, row_cost, Ahead(tokens=tokens, row_s=1e-4))


def test_decoding_ahead_takes_a_share_of_the_steps():
    plain, decoder = Decoder(Affine(), max_running=8), Decoder(Affine(), max_running=8)
    for each in (plain, decoder):
        each.submit(0.0, SimulatedRequest(0, "a", 10, 1000))
    decoder.speculate(0.0, ahead(2.0))
    end, long = decoder.next_event(0.0), plain.next_event(0.0)
    assert decoder.advance(end) == [(0, 1000)]
    drafts = 16 * 1e-4
    assert end == pytest.approx((long + 1000 * drafts) / 2, rel=1e-3)
    assert (decoder.steps, decoder.generated_tokens) == (500, 1000)
    assert decoder.verifications == pytest.approx(500)
    assert decoder.drafted == pytest.approx(500 * 16)
    assert decoder.accepted == pytest.approx(500)


def test_it_begins_where_few_enough_run():
    decoder = Decoder(Affine(), max_running=8)
    decoder.speculate(0.0, ahead(2.0, below=1))
    decoder.submit(0.0, SimulatedRequest(0, "a", 10, 100))
    decoder.submit(0.0, SimulatedRequest(1, "b", 10, 300))
    first = decoder.next_event(0.0)
    decoder.advance(first)
    assert (decoder.steps, decoder.drafted) == (100, 0)
    decoder.advance(decoder.next_event(first))
    assert decoder.steps == 200
    assert decoder.generated_tokens == 400


def test_it_may_begin_between_two_events():
    decoder = Decoder(Affine(slope=0.0), max_running=8)
    decoder.submit(0.0, SimulatedRequest(0, "a", 10, 1000))
    whole = decoder.next_event(0.0)
    decoder.speculate(whole / 2, ahead(4.0))
    end = decoder.next_event(whole / 2)
    assert decoder.advance(end) == [(0, 1000)]
    assert 0.5 * whole < end < 0.75 * whole
    assert decoder.steps == pytest.approx(625, abs=2)


def test_a_draft_ends_where_it_is_reached_too_seldom():
    assert ahead(1.0).pace(1) == PLAIN
    free, dear = ahead(3.0).pace(1), ahead(3.0, row_cost=0.2).pace(1)
    assert (free.tokens, free.drafted) == (pytest.approx(3.0), 16)
    assert 1.0 < dear.tokens < free.tokens
    assert ahead(3.0, row_cost=0.2).pace(4).drafted < dear.drafted
    assert ahead(3.0, row_cost=1.0).pace(8) == PLAIN
    assert ahead(3.0, below=64).pace(32).drafted == 128 // 32 - 1


def test_a_measured_pace_is_taken_as_it_is():
    measured = Ahead(tokens=3.0, drafted=4, measured={1: 1e-3, 4: 2e-3})
    rule = Rule(4, 16, 0, 0.0, measured)
    costs = Affine()
    assert ahead_terms(costs, 2, rule) == (pytest.approx(4e-3 / 3), costs.slope)
    assert ahead_terms(costs, 8, rule) == (costs.step_s(8, 0.0), costs.slope)
    assert rule.pace(1).drafted == 4


def test_more_tokens_than_a_draft_has_are_refused():
    with pytest.raises(ValueError, match=r"tokens=6 of a draft of drafted=4: at most one more"):
        Ahead(tokens=6.0, drafted=4)
