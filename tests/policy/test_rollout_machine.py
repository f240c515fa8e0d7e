"""Whatever happens in whatever order: every prompt is trained exactly once an epoch, no
environment is asked twice, and the journal replays."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_world import World, local_machine
from policy_world import settings as make_settings

from rollpacker.config.rollout import RACED, TailMode
from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter, replay
from rollpacker.core.types import AttemptId, EngineId, RoundKind
from rollpacker.policy.engines.hardware import RowCosts
from rollpacker.policy.lengths import LengthHistory
from rollpacker.policy.rollout import RolloutPolicy, from_journal
from rollpacker.policy.rounds.race import Racing
from rollpacker.policy.rounds.rule import RoundView, TailRule

ENVIRONMENT, ENGINE, REWARD = "environment", "engine", "reward"

ROUNDS = {
    "mode": st.sampled_from([*get_args(TailMode), f"{__file__}:Impatient"]),
    "prompts": st.integers(1, 4),
    "responses": st.integers(1, 4),
    "first": st.integers(1, 12),
    "second": st.integers(0, 6),
    "eta": st.sampled_from([1.0, 1.25, 1.5, 2.0, 4.0]),
    "staleness": st.integers(1, 3),
    "dynamic": st.booleans(),
    "group_tokens": st.sampled_from([64, 300]),
    "stream": st.booleans(),
    "ordered": st.booleans(),
    "updates": st.sampled_from([1, 1, 2]),
    "asynchronous": st.booleans(),
    "workers": st.integers(1, 3),
    "retries": st.sampled_from([0, 1, 1, 2]),
    "scaling": st.sampled_from(["consolidate", "paper", "fixed", "off"]),
    "tail": st.integers(0, 1),
    "replica_engines": st.integers(0, 2),
    "layout": st.sampled_from(["colocated", "colocated", "separate"]),
    "rows": st.sampled_from([None, RowCosts(free=1, each=0.05)]),
    "turns": st.booleans(),
    "talks": st.booleans(),
}


class Impatient(TailRule):
    """A mode of a user's: it ends short rounds early, and remembers how often it was asked."""

    asked = 0

    def start(self, step: int, lengths: LengthHistory) -> Racing:
        return Racing(eta_prompts=self.tail.eta_prompts, stops=step % 3 > 0)

    def ends(self, round: RoundView) -> bool:
        self.asked += 1
        return round.longest > 60 and (self.asked % 2 > 0 or round.decoding < 3)

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.asked = state["asked"]


class RolloutMachine(RuleBasedStateMachine):
    """Random rounds of every mode, with failures, lost workers, stale events and resumes.

    Attempts of every second run talk with environments that answer, end, and fail.
    """

    @initialize(chosen=st.fixed_dictionaries(ROUNDS))
    def begin(self, chosen: dict[str, Any]) -> None:
        one = chosen
        mode, scaling, ordered = one["mode"], one["scaling"], one["ordered"]
        talks = one["talks"] and mode != "partial"
        tail = one["tail"] if scaling in ("consolidate", "off") else 0
        given = make_settings(
            {
                "prompts_per_step": one["prompts"],
                "num_generations": one["responses"],
                "max_retries": one["retries"],
                "tail_batching": {
                    "mode": mode,
                    "eta_prompts": one["eta"],
                    "eta_responses": one["eta"],
                    "max_staleness": one["staleness"],
                    "audit_every": 2,
                    "audit_prompts": 1,
                },
                "dynamic_sampling": {"enabled": one["dynamic"], "max_draws": 2},
                "streaming": {"group_tokens": one["group_tokens"], "scaling": scaling},
            },
            {"a": one["first"]} | ({"b": one["second"]} if one["second"] else {}),
            stream=one["stream"] and mode != "off" and one["updates"] == 1 and not ordered,
            asynchronous=one["asynchronous"] or mode in RACED or ":" in mode,
            ordered=ordered,
            updates=one["updates"],
            tail_engines=tail if one["layout"] == "colocated" else 0,
            replica_engines=one["replica_engines"],
            layout=one["layout"],
            rows=one["rows"],
            turns=one["turns"] and not ordered,
            machine=None
            if scaling == "off"
            else local_machine(one["workers"], max(1, one["replica_engines"])),
        )
        self.world = World(given, one["workers"], talks=talks)
        self.failures = 0
        self.from_here()

    def from_here(self) -> None:
        """A journal begins."""
        self.since = len(self.world.log)
        self.state = json.loads(json.dumps(self.world.policy.state_dict()))

    def pick(self, data: st.DataObject, items: object) -> Any:
        return data.draw(st.sampled_from(sorted(items)))  # type: ignore[call-overload]

    def some(self, data: st.DataObject, attempts: object) -> list[AttemptId]:
        """One of them, or many where they talk: what happens to one may end others."""
        known = sorted(attempts)  # type: ignore[call-overload]
        first = data.draw(st.integers(0, len(known) - 1))
        count = data.draw(st.sampled_from([1, 1, 4, 16])) if self.world.talks else 1
        return known[first : first + count]

    @precondition(lambda self: self.world.over)
    @rule()
    def start_step(self) -> None:
        if self.world.epoch_over():
            self.world.next_epoch()
        self.world.start()

    @precondition(lambda self: self.world.running and not self.world.talks)
    @rule(data=st.data(), tokens=st.integers(1, 100))
    def finish_attempt(self, data: st.DataObject, tokens: int) -> None:
        reason = "length" if tokens == 100 else "stop"
        self.world.finish(self.pick(data, self.world.running), tokens, reason)

    @precondition(lambda self: self.world.talks and self.world.decoding)
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

    @precondition(lambda self: self.world.grading)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def grade(self, data: st.DataObject, reward: float) -> None:
        for number, attempt in enumerate(self.some(data, self.world.grading)):
            if attempt in self.world.grading:
                self.world.grade(attempt, (reward + number) % 2)

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

    @precondition(lambda self: self.world.waking)
    @rule(data=st.data())
    def confirm_wake(self, data: st.DataObject) -> None:
        self.world.confirm_wake(self.pick(data, self.world.waking))

    @precondition(lambda self: self.world.lying_down)
    @rule(data=st.data())
    def confirm_sleep(self, data: st.DataObject) -> None:
        self.world.confirm_sleep(self.pick(data, self.world.lying_down))

    @precondition(lambda self: self.world.applying)
    @rule()
    def apply(self) -> None:
        self.world.apply()
        assert not (self.world.over and self.world.undecided)

    @precondition(lambda self: not self.world.over)
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
            (self.lose_devices, True),
            (self.stale_events, world.index),
        ]
        now = [happen for happen, may in possible if may]
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
        made = self.world.fail(attempt, event)
        again = [(m.prompt, m.index) for m in made if isinstance(m, do.StartAttempt)]
        assert [each for each in again if each[0] == waits] == wanted

    def fail_attempt(self, data: st.DataObject) -> None:
        attempt = self.pick(data, self.world.decoding)
        self.failures += 1
        self.world.fail(attempt, ev.AttemptFailed(attempt=attempt, error=ENGINE))

    def fail_grading(self, data: st.DataObject) -> None:
        attempt = self.pick(data, self.world.grading)
        self.failures += 1
        self.world.fail(attempt, ev.GradingFailed(attempt=attempt, error=REWARD))

    def lose_devices(self, data: st.DataObject) -> None:
        """Engines, replicas, or both; some of each are left, or the driver would end the step."""
        engines, replicas = self.world.workers, self.world.replicas
        if not self.world.settings.rules.replica_engines and not self.world.separate:
            if len(engines) > 1:
                self.world.lose(data.draw(st.sampled_from(engines)))
            return
        dead = data.draw(st.lists(st.sampled_from(engines), unique=True, max_size=len(engines) - 1))
        gone = data.draw(
            st.lists(st.sampled_from(replicas), unique=True, max_size=len(replicas) - 1)
        )
        if dead or gone:
            self.world.lose_devices(dead, gone)

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
            events += [
                ev.EpisodeFailed(attempt=attempt, error="late", blameless=True),
                ev.AttemptGraded(attempt=attempt, reward=1.0),
                ev.GradingFailed(attempt=attempt, error="late"),
                ev.AttemptFinished(attempt=attempt, tokens=1, finish_reason="stop"),
                ev.AttemptAborted(attempt=attempt, tokens=1),
            ]
        before = json.dumps(world.policy.state_dict())
        for event in events:
            place = len(world.log)
            world.tell(event)
            assert all(not made for _, made in world.log[place:])
        assert json.dumps(world.policy.state_dict()) == before

    @precondition(lambda self: self.world.over)
    @rule()
    def resume(self) -> None:
        before = self.world.policy.state_dict()
        self.from_here()
        self.world.policy = RolloutPolicy(self.world.settings)
        self.world.policy.load_state_dict(self.state)
        assert self.world.policy.state_dict() == before

    @invariant()
    def the_round_is_in_order(self) -> None:
        """Something is under way, groups are whole, and long rounds do not race."""
        world = getattr(self, "world", None)
        if world is None or world.over:
            return
        assert not world.idle(), "nothing is under way and the step is not over"
        assert self.failures or {*map(len, world.accepted.values())} <= {world.responses}
        assert world.kind == RoundKind.SHORT or not world.deferred

    @invariant()
    def each_is_asked_once(self) -> None:
        """An environment for every turn that ended, an engine for every answer."""
        world = getattr(self, "world", None)
        if world is None or not world.talks:
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

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None:
            return
        if not world.over:
            world.finish_all()
            assert not world.undecided
        with tempfile.TemporaryDirectory() as folder:
            replays(Path(folder) / "journal.jsonl", world, self.state, self.since)


def replays(path: Path, world: World, state: dict[str, Any], since: int = 0) -> None:
    """The journal of what a policy was told since then gives its decisions again."""
    writer = JournalWriter(path)
    writer.meta({"settings": world.settings.to_json(), "state": state})
    for number, (event, made) in enumerate(world.log[since:], since + 1):
        writer.record(float(number), event, made)
    writer.close()
    result = replay(path, from_journal)
    assert (result.events, result.differences) == (len(world.log) - since, [])


RolloutMachine.TestCase.settings = settings(
    max_examples=2 * settings().max_examples,
    stateful_step_count=80,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestRolloutMachine = RolloutMachine.TestCase


def test_epochs_train_every_prompt_once_and_replay(tmp_path: Path) -> None:
    for mode in ("exact", "off", "race", "prompts", "partial"):
        given = make_settings(
            {
                "prompts_per_step": 4,
                "num_generations": 3,
                "tail_batching": {"mode": mode, "eta_prompts": 1.5, "eta_responses": 1.4},
            },
            {"a": 13, "b": 8},
        )
        world = World(given)
        state = world.policy.state_dict()
        while not world.epoch_over():
            world.start()
            world.finish_all()
        assert set(world.epoch_trained.values()) == {1}
        assert len(world.epoch_trained) == 21
        replays(tmp_path / f"{mode}.jsonl", world, state)


def test_one_that_moves_while_its_environment_acts_goes_on_where_it_is_then() -> None:
    freed = {"scaling": "fixed", "scaling_fraction": 0.25}
    rollout = {"prompts_per_step": 2, "num_generations": 2, "streaming": freed}
    world = World(make_settings(rollout, {"a": 2}, machine=local_machine(2)), talks=True)
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
    world.finish_all()


def test_failures_that_are_anothers_fault_are_not_counted() -> None:
    rollout = {"prompts_per_step": 1, "num_generations": 2, "max_retries": 1}
    world = World(make_settings(rollout, {"a": 1}), talks=True)
    world.start()
    for _ in range(50):
        attempt = max(world.acting)
        event = ev.EpisodeFailed(attempt=attempt, error=ENVIRONMENT, blameless=True)
        world.fail(attempt, event)
    attempt = max(world.acting)
    again = world.fail(attempt, ev.AttemptFailed(attempt=attempt, error=ENGINE))
    assert any(isinstance(made, do.StartAttempt) for made in again)
    world.finish_all()
    assert [len(group) for group in world.accepted.values()] == [2]


def test_a_response_from_before_an_interruption_brings_its_turns_along() -> None:
    rollout = {"prompts_per_step": 1, "num_generations": 2}
    world = World(make_settings(rollout, {"a": 1}), workers=1, talks=True)
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
