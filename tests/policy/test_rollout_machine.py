"""Whatever happens in whatever order: every prompt is trained exactly once an epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from policy_world import World, local_machine
from policy_world import settings as make_settings

from rollpacker.config.rollout import RACED, TailMode
from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter, replay
from rollpacker.core.types import AttemptId, RoundKind
from rollpacker.policy.engines.fleet import Layout
from rollpacker.policy.engines.hardware import RowCosts
from rollpacker.policy.rollout import RolloutPolicy, from_journal


class RolloutMachine(RuleBasedStateMachine):
    """Random rounds of every mode, with failures, lost workers, stale events and resumes."""

    @initialize(
        mode=st.sampled_from(get_args(TailMode)),
        prompts=st.integers(1, 4),
        responses=st.integers(1, 4),
        first=st.integers(1, 9),
        second=st.integers(0, 6),
        eta=st.sampled_from([1.0, 1.25, 2.0, 4.0]),
        staleness=st.integers(1, 3),
        dynamic=st.booleans(),
        stream=st.booleans(),
        ordered=st.booleans(),
        updates=st.sampled_from([1, 1, 2]),
        asynchronous=st.booleans(),
        workers=st.integers(1, 3),
        retries=st.integers(0, 2),
        scaling=st.sampled_from(["consolidate", "paper", "fixed", "off"]),
        tail=st.integers(0, 1),
        replica_engines=st.integers(0, 2),
        layout=st.sampled_from(["colocated", "colocated", "separate"]),
        rows=st.sampled_from([None, RowCosts(free=1, each=0.05)]),
        turns=st.booleans(),
    )
    def begin(
        self,
        mode: str,
        prompts: int,
        responses: int,
        first: int,
        second: int,
        eta: float,
        staleness: int,
        dynamic: bool,
        stream: bool,
        ordered: bool,
        updates: int,
        asynchronous: bool,
        workers: int,
        retries: int,
        scaling: str,
        tail: int,
        replica_engines: int,
        layout: Layout,
        rows: RowCosts | None,
        turns: bool,
    ) -> None:
        sizes = {"a": first} | ({"b": second} if second else {})
        given = make_settings(
            {
                "prompts_per_step": prompts,
                "num_generations": responses,
                "max_retries": retries,
                "tail_batching": {
                    "mode": mode,
                    "eta_prompts": eta,
                    "eta_responses": eta,
                    "max_staleness": staleness,
                    "audit_every": 2,
                    "audit_prompts": 1,
                },
                "dynamic_sampling": {"enabled": dynamic, "max_draws": 2},
                "streaming": {"group_tokens": 300, "scaling": scaling},
            },
            sizes,
            stream=stream and mode != "off" and updates == 1 and not ordered,
            asynchronous=asynchronous or mode in RACED,
            ordered=ordered,
            updates=updates,
            tail_engines=tail if scaling in ("consolidate", "off") and layout == "colocated" else 0,
            replica_engines=replica_engines,
            layout=layout,
            rows=rows,
            turns=turns and not ordered,
            machine=None if scaling == "off" else local_machine(workers, max(1, replica_engines)),
        )
        self.world = World(given, workers)
        self.failures = 0

    def pick(self, data: st.DataObject, items: object) -> object:
        return data.draw(st.sampled_from(sorted(items)))  # type: ignore[call-overload]

    @precondition(lambda self: self.world.over and not self.world.epoch_over())
    @rule()
    def start_step(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.over and self.world.epoch_over())
    @rule()
    def next_epoch(self) -> None:
        self.check_epoch()
        fresh = World(self.world.settings, 1).fresh
        self.world.fresh = fresh
        self.world.epoch_trained.clear()
        self.world.dropped.clear()
        self.world.first.clear()

    def check_epoch(self) -> None:
        trained, dropped = self.world.epoch_trained, self.world.dropped
        everything = {
            prompt.id
            for domain, count in self.world.settings.sizes.items()
            for prompt in World._prompts(domain, count)
        }
        assert set(trained) | dropped == everything
        assert not set(trained) & dropped
        assert all(count == 1 for count in trained.values())

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), tokens=st.integers(1, 100))
    def finish_attempt(self, data: st.DataObject, tokens: int) -> None:
        reason = "length" if tokens == 100 else "stop"
        self.world.finish(self.pick(data, self.world.running), tokens, reason)

    @precondition(lambda self: self.world.grading)
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0]))
    def grade_attempt(self, data: st.DataObject, reward: float) -> None:
        self.world.grade(self.pick(data, self.world.grading), reward)

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
    def apply_update(self) -> None:
        self.world.apply()

    @precondition(lambda self: self.world.running and self.failures < 6)
    @rule(data=st.data())
    def fail_attempt(self, data: st.DataObject) -> None:
        attempt = self.pick(data, self.world.running)
        self.failures += 1
        del self.world.running[attempt]
        self.world.moving.pop(attempt, None)
        self.world.tell(ev.AttemptFailed(attempt=attempt, error="engine"))

    @precondition(lambda self: self.world.grading and self.failures < 6)
    @rule(data=st.data())
    def fail_grading(self, data: st.DataObject) -> None:
        attempt = self.pick(data, self.world.grading)
        self.failures += 1
        self.world.grading.discard(attempt)
        self.world.tell(ev.GradingFailed(attempt=attempt, error="reward"))

    @precondition(lambda self: not self.world.over)
    @rule(data=st.data())
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

    @precondition(lambda self: not self.world.over)
    @rule(attempt=st.integers(10_000, 10_001))
    def stale_event(self, attempt: int) -> None:
        id_ = AttemptId(attempt)
        before = json.dumps(self.world.policy.state_dict())
        for event in (
            ev.AttemptGraded(attempt=id_, reward=1.0),
            ev.GradingFailed(attempt=id_, error="late"),
            ev.AttemptFinished(attempt=id_, tokens=1, finish_reason="stop"),
            ev.AttemptAborted(attempt=id_, tokens=1),
        ):
            decisions = len(self.world.log)
            self.world.tell(event)
            assert all(not made for _, made in self.world.log[decisions:])
        assert json.dumps(self.world.policy.state_dict()) == before

    @precondition(lambda self: self.world.over)
    @rule()
    def resume(self) -> None:
        state = json.loads(json.dumps(self.world.policy.state_dict()))
        self.world.policy = RolloutPolicy(self.world.settings)
        self.world.policy.load_state_dict(state)

    @invariant()
    def never_stuck(self) -> None:
        world = getattr(self, "world", None)
        if world is not None and not world.over:
            assert not world.idle(), "nothing is under way and the step is not over"

    @invariant()
    def groups_are_whole(self) -> None:
        world = getattr(self, "world", None)
        if world is not None and self.failures == 0:
            assert all(len(group) == world.responses for group in world.accepted.values())

    @invariant()
    def long_rounds_do_not_race(self) -> None:
        world = getattr(self, "world", None)
        if world is not None and not world.over and world.kind != RoundKind.SHORT:
            assert not world.deferred

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is not None:
            finish_all(world)


def finish_all(world: World) -> None:
    """Whatever state a run is in, it can be brought to the end of its step."""
    for _ in range(10_000):
        if world.over:
            return
        if world.running:
            world.finish(min(world.running))
        elif world.grading:
            world.grade(min(world.grading), float(len(world.graded) % 2))
        elif world.stopping:
            world.confirm_abort(min(world.stopping))
        elif world.lying_down:
            world.confirm_sleep(min(world.lying_down))
        elif world.gradients:
            world.sum_gradients(0)
        elif world.applying:
            world.apply()
    raise AssertionError("the step does not end")


RolloutMachine.TestCase.settings = settings(
    max_examples=settings().max_examples // 2,
    stateful_step_count=60,
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
        writer = JournalWriter(tmp_path / f"{mode}.jsonl")
        writer.meta({"settings": given.to_json(), "state": world.policy.state_dict()})
        while not world.epoch_over():
            world.start()
            finish_all(world)
        assert set(world.epoch_trained.values()) == {1}
        assert len(world.epoch_trained) == 21
        for number, (event, made) in enumerate(world.log, start=1):
            writer.record(float(number), event, made)
        writer.close()
        result = replay(tmp_path / f"{mode}.jsonl", from_journal)
        assert result.events == len(world.log)
        assert result.differences == []
