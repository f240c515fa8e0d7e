"""Attempts of several turns: in whatever order things happen, none is asked twice, none is lost."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_world import World, local_machine
from policy_world import settings as make_settings
from talking_world import Talking, finish_all

from rollpacker.config.rollout import RACED
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter, replay
from rollpacker.core.types import AttemptId, EngineId
from rollpacker.policy.rollout import RolloutPolicy, from_journal

ENVIRONMENT, ENGINE, REWARD = "environment", "engine", "reward"


class TurnsMachine(RuleBasedStateMachine):
    """Random rounds whose attempts talk with environments that answer, end, and fail."""

    @initialize(
        mode=st.sampled_from(["off", "exact", "race", "prompts"]),
        prompts=st.sampled_from([1, 2, 3, 4, 4]),
        responses=st.integers(1, 3),
        count=st.integers(1, 12),
        eta=st.sampled_from([1.0, 1.5, 2.0]),
        asynchronous=st.booleans(),
        workers=st.sampled_from([1, 2, 3, 3]),
        retries=st.integers(0, 2),
        dynamic=st.sampled_from([False, False, True]),
        compared=st.booleans(),
        tail=st.integers(0, 1),
    )
    def begin(
        self,
        mode: str,
        prompts: int,
        responses: int,
        count: int,
        eta: float,
        asynchronous: bool,
        workers: int,
        retries: int,
        dynamic: bool,
        compared: bool,
        tail: int,
    ) -> None:
        given = make_settings(
            {
                "prompts_per_step": prompts,
                "num_generations": responses,
                "max_retries": retries,
                "tail_batching": {
                    "mode": mode,
                    "eta_prompts": eta,
                    "eta_responses": eta,
                    "audit_every": 2,
                    "audit_prompts": 1,
                },
                "dynamic_sampling": {"enabled": dynamic, "max_draws": 2},
                "streaming": {"group_tokens": 64},
            },
            {"a": count},
            stream=mode != "off",
            asynchronous=asynchronous or mode in RACED,
            tail_engines=tail,
            machine=local_machine(workers) if compared else None,
        )
        self.world = Talking(given, workers)
        self.failures = 0
        self.from_here()

    def from_here(self) -> None:
        """A journal begins."""
        self.since = len(self.world.log)
        self.state = json.loads(json.dumps(self.world.policy.state_dict()))

    def pick(self, data: st.DataObject, attempts: object) -> AttemptId:
        return data.draw(st.sampled_from(sorted(attempts)))  # type: ignore[call-overload]

    def some(self, data: st.DataObject, attempts: object) -> list[AttemptId]:
        """One of them, or many: what happens to one may end others."""
        known = sorted(attempts)  # type: ignore[call-overload]
        first = data.draw(st.integers(0, len(known) - 1))
        return known[first : first + data.draw(st.sampled_from([1, 1, 4, 16]))]

    @precondition(lambda self: self.world.over and not self.world.epoch_over())
    @rule()
    def start_step(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.over and self.world.epoch_over())
    @rule()
    def next_epoch(self) -> None:
        """Every prompt was kept once, or dropped."""
        world = self.world
        prompts = {prompt.id for prompt in World._prompts("a", world.settings.sizes["a"])}
        assert world.epoch_trained.keys() | world.dropped == prompts
        assert not world.epoch_trained.keys() & world.dropped
        assert set(world.epoch_trained.values()) <= {1}
        world.fresh = World(world.settings, 1).fresh
        world.epoch_trained.clear()
        world.dropped.clear()

    @precondition(lambda self: self.world.decoding)
    @rule(data=st.data(), tokens=st.integers(1, 100), cut=st.booleans())
    def end_turn(self, data: st.DataObject, tokens: int, cut: bool) -> None:
        for attempt in self.some(data, self.world.decoding):
            if attempt in self.world.decoding:
                self.world.end_turn(attempt, tokens, "length" if cut else "stop")

    @precondition(lambda self: self.world.acting)
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        for attempt in self.some(data, self.world.acting):
            if attempt in self.world.acting:
                self.world.reply(attempt)

    @precondition(lambda self: self.world.acting)
    @rule(data=st.data(), tokens=st.sampled_from([0, 7, 100, 100]))
    def end_episode(self, data: st.DataObject, tokens: int) -> None:
        for attempt in self.some(data, self.world.acting):
            if attempt in self.world.acting:
                self.world.finish(attempt, tokens)

    @precondition(lambda self: not self.world.over and not self.world.applying)
    @rule(data=st.data(), number=st.integers(0, 9))
    def mishap(self, data: st.DataObject, number: int) -> None:
        """Something that is rarer than the rest."""
        world = self.world
        fails = self.failures < 6
        possible = [
            (self.lose_episode, world.acting),
            (self.fail_episode, world.acting and fails),
            (self.fail_attempt, world.decoding and fails),
            (self.fail_grading, world.grading and fails),
            (self.lose_worker, len(world.workers) > 1),
            (self.stale_events, world.index),
        ]
        now = [happen for happen, may in possible if may]
        if now:
            now[number % len(now)](data)

    def fail_episode(self, data: st.DataObject) -> None:
        """Another sample takes its place."""
        attempt = self.pick(data, self.world.acting)
        self.failures += 1
        prompt, index = self.world.index[attempt]
        made = self.world.fail(attempt, ev.EpisodeFailed(attempt=attempt, error=ENVIRONMENT))
        again = [m for m in made if isinstance(m, do.StartAttempt) and m.prompt == prompt]
        assert all(start.index > index for start in again)

    def lose_episode(self, data: st.DataObject) -> None:
        """By another's fault: the same sample begins again, as often as it takes."""
        attempt = self.pick(data, self.world.acting)
        sample, waits = self.world.index[attempt], self.world.index[attempt][0]
        wanted = [sample] if waits in self.world.undecided else []
        event = ev.EpisodeFailed(attempt=attempt, error=ENVIRONMENT, blameless=True)
        made = self.world.fail(attempt, event, charge=False)
        again = [(m.prompt, m.index) for m in made if isinstance(m, do.StartAttempt)]
        assert [each for each in again if each[0] == waits] == wanted

    def fail_attempt(self, data: st.DataObject) -> None:
        attempt = self.pick(data, self.world.decoding)
        self.failures += 1
        self.world.fail(attempt, ev.AttemptFailed(attempt=attempt, error=ENGINE))

    @precondition(lambda self: self.world.grading)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def grade(self, data: st.DataObject, reward: float) -> None:
        for number, attempt in enumerate(self.some(data, self.world.grading)):
            if attempt in self.world.grading:
                self.world.grade(attempt, (reward + number) % 2)

    def fail_grading(self, data: st.DataObject) -> None:
        attempt = self.pick(data, self.world.grading)
        self.failures += 1
        self.world.fail(attempt, ev.GradingFailed(attempt=attempt, error=REWARD))

    @precondition(lambda self: self.world.stopping)
    @rule(data=st.data())
    def confirm_abort(self, data: st.DataObject) -> None:
        self.world.confirm_abort(self.pick(data, self.world.stopping))

    @precondition(lambda self: self.world.moving)
    @rule(data=st.data())
    def confirm_move(self, data: st.DataObject) -> None:
        self.world.confirm_move(self.pick(data, self.world.moving))

    @precondition(lambda self: self.world.offered and not self.world.over)
    @rule()
    def release_tail(self) -> None:
        self.world.tell(ev.TailReleased())

    @precondition(lambda self: self.world.gradients)
    @rule(data=st.data())
    def sum_gradients(self, data: st.DataObject) -> None:
        self.world.sum_gradients(data.draw(st.integers(0, len(self.world.gradients) - 1)))

    @precondition(lambda self: self.world.applying)
    @rule()
    def apply(self) -> None:
        self.world.apply()
        assert not (self.world.over and self.world.undecided)

    def lose_worker(self, data: st.DataObject) -> None:
        self.world.lose(data.draw(st.sampled_from(self.world.workers)))

    def stale_events(self, data: st.DataObject) -> None:
        """Of attempts that are not the policy's any more, or never were."""
        world = self.world
        ended = [a for a in world.index if a not in world.running and a not in world.grading]
        attempt = self.pick(data, [*ended, AttemptId(10_000)])
        events: list[ev.Event] = [
            ev.TurnFinished(attempt=attempt, turn=0, tokens=1, finish_reason="stop"),
            ev.EnvironmentReplied(attempt=attempt, turn=0, tokens=1, seconds=0.0),
        ]
        if attempt not in world.index:
            events.append(ev.EpisodeFailed(attempt=attempt, error="late", blameless=True))
        for event in events:
            place = len(world.log)
            world.tell(event)
            assert all(not made for _, made in world.log[place:])

    @precondition(lambda self: self.world.over)
    @rule()
    def resume(self) -> None:
        before = self.world.policy.state_dict()
        self.from_here()
        self.world.policy = RolloutPolicy(self.world.settings)
        self.world.policy.load_state_dict(self.state)
        assert self.world.policy.state_dict() == before

    @invariant()
    def each_is_asked_once(self) -> None:
        """An environment for every turn that ended, an engine for every answer."""
        world = getattr(self, "world", None)
        if world is None:
            return
        assert world.steps == world.turns
        for attempt in world.running:
            assert world.goes[attempt] == world.turns[attempt] + (attempt not in world.acting)

    @invariant()
    def the_ledger_counts(self) -> None:
        world = getattr(self, "world", None)
        if world is None or world.over:
            return
        book = world.policy._ledger
        bound = {a: world.moving.get(a, engine) for a, engine in world.running.items()}
        bound = {a: e if e in world.workers else world.running[a] for a, e in bound.items()}
        assert book.running.keys() == world.running.keys()
        assert book.loads == dict.fromkeys(world.workers, 0) | Counter(world.running.values())
        assert book.bound == dict.fromkeys(world.workers, 0) | Counter(bound.values())
        assert book.busy == len(set(bound.values()))
        assert (book.grading, book.stopping) == (len(world.grading), len(world.stopping))
        for attempt, one in book.running.items():
            assert (one.turns, one.wait_s) == (world.turns[attempt], 0.5 * world.goes[attempt])

    @invariant()
    def never_stuck(self) -> None:
        world = getattr(self, "world", None)
        assert world is None or world.over or not world.idle()

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        if not world.over:
            finish_all(world)
            assert not world.undecided
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal.jsonl"
            writer = JournalWriter(path)
            writer.meta({"settings": world.settings.to_json(), "state": self.state})
            for number, (event, made) in enumerate(world.log[self.since :], self.since + 1):
                writer.record(float(number), event, made)
            writer.close()
            assert replay(path, from_journal).differences == []


TurnsMachine.TestCase.settings = settings(
    max_examples=settings().max_examples // 2,
    stateful_step_count=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestTurnsMachine = TurnsMachine.TestCase


def test_one_that_moves_while_its_environment_acts_goes_on_where_it_is_then() -> None:
    freed = {"scaling": "fixed", "scaling_fraction": 0.25}
    rollout = {"prompts_per_step": 2, "num_generations": 2, "streaming": freed}
    world = Talking(make_settings(rollout, {"a": 2}, machine=local_machine(2)))
    world.start()
    for attempt in sorted(world.acting):
        world.reply(attempt)
    assert [world.running[AttemptId(attempt)] for attempt in range(4)] == [0, 0, 1, 1]
    world.end_turn(AttemptId(2))
    world.end_turn(AttemptId(0))
    world.finish(AttemptId(0), 100)
    assert world.running == {1: 0, 2: 0, 3: 1}
    assert world.moving == {3: 0}
    world.reply(AttemptId(2))
    _, made = world.log[-1]
    assert made == [do.ContinueAttempt(attempt=AttemptId(2), engine=EngineId(0))]
    finish_all(world)


def test_failures_that_are_anothers_fault_are_not_counted() -> None:
    rollout = {"prompts_per_step": 1, "num_generations": 2, "max_retries": 0}
    world = Talking(make_settings(rollout, {"a": 1}))
    world.start()
    for _ in range(50):
        attempt = max(world.acting)
        event = ev.EpisodeFailed(attempt=attempt, error=ENVIRONMENT, blameless=True)
        world.fail(attempt, event, charge=False)
    finish_all(world)
    assert [len(group) for group in world.accepted.values()] == [2]


def test_a_response_from_before_an_interruption_brings_its_turns_along() -> None:
    rollout = {"prompts_per_step": 1, "num_generations": 2}
    world = Talking(make_settings(rollout, {"a": 1}), workers=1)
    world.start()
    fresh, again = sorted(world.acting)
    world.reply(fresh)
    world.end_turn(fresh)
    del world.acting[again]
    world.running.pop(again)
    finished = ev.AttemptFinished(
        attempt=again, tokens=9, finish_reason="stop", turns=3, seconds=6.0
    )
    world.tell(finished)
    one = world.policy._ledger.attempts[again]
    assert (one.turns, one.wait_s, one.tokens) == (3, 6.0, 9)
    one = world.policy._ledger.attempts[fresh]
    assert (one.turns, one.wait_s, one.added, one.tokens) == (1, 0.5, 3, 5)
