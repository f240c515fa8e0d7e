"""What a run's journal tells of engines whose responses have environments; journals by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.codec import dumps, loads
from rollpacker.core.types import (
    AttemptId,
    EngineId,
    GroupPart,
    Prompt,
    PromptId,
    ReplicaId,
    RoundKind,
)
from rollpacker.sim.recorded.rerun import gone_on, whole
from rollpacker.sim.recorded.run_reader import Interval, Reader, RunStep, Tried
from rollpacker.sim.workload.workload import ScriptedTurn, Turns

P = PromptId("p")


class Story:
    """A journal's lines, as a reader takes them."""

    def __init__(self, *, cores: int = 0, most: int = 64) -> None:
        self.reader = Reader(cores, most)
        started = ev.StepStarted(
            step=0, engines=(EngineId(0), EngineId(1)), replicas=(ReplicaId(0),), remaining={}
        )
        self.tell(0.0, started, do.BeginRound(step=0, round=RoundKind.FULL))
        self.tell(0.0, ev.PromptsDrawn(prompts=(Prompt(id=P, tokens=100),)))

    def tell(self, now: float, event: ev.Event, *made: do.Decision) -> None:
        self.reader.take(now, loads(dumps(event)), loads(dumps(list(made))))

    @property
    def step(self) -> RunStep:
        return self.reader.steps[0]

    def tried(self, attempt: int = 0) -> Tried:
        return self.step.attempts[attempt]

    def start(self, now: float, *attempts: int) -> None:
        """Their environments begin."""
        starts = [
            do.StartAttempt(attempt=AttemptId(a), prompt=P, index=a, engine=EngineId(0))
            for a in attempts
        ]
        self.tell(now, ev.PromptsDrawn(prompts=()), *starts)

    def turned(self, now: float, attempt: int, turn: int, tokens: int) -> None:
        event = ev.TurnFinished(
            attempt=AttemptId(attempt), turn=turn, tokens=tokens, finish_reason="stop"
        )
        self.tell(now, event, do.StepEnvironment(attempt=AttemptId(attempt)))

    def replied(self, now: float, attempt: int, turn: int, **more: Any) -> None:
        given = {"tokens": 0, "seconds": 1.0} | more
        engine = EngineId(given.pop("engine", 0))
        event = ev.EnvironmentReplied(attempt=AttemptId(attempt), turn=turn, **given)
        self.tell(now, event, do.ContinueAttempt(attempt=AttemptId(attempt), engine=engine))

    def finished(self, now: float, attempt: int, tokens: int) -> None:
        event = ev.AttemptFinished(attempt=AttemptId(attempt), tokens=tokens, finish_reason="stop")
        self.tell(now, event)


def two_turns(story: Story, *others: int) -> None:
    """Attempt 0 begins after 1 s, decodes 10 tokens in 10 s, waits 3 s, decodes 5 in 6 s."""
    story.start(0.0, 0, *others)
    for each in (0, *others):
        story.replied(1.0, each, -1)
    story.turned(11.0, 0, 0, 10)
    story.replied(14.0, 0, 0, tokens=40, seconds=3.0)
    story.turned(20.0, 0, 1, 15)


def test_turns_are_kept_with_their_waits() -> None:
    story = Story()
    two_turns(story)
    story.finished(22.5, 0, 15)
    assert story.tried().turns == [
        ScriptedTurn(0, 1.0),
        ScriptedTurn(10, 3.0, 40),
        ScriptedTurn(5, 2.5),
    ]
    assert (story.tried().tokens, story.tried().added, story.tried().end_s) == (15, 40, 22.5)
    assert story.step.last_end_s == 22.5


def test_a_turn_tells_of_its_own_time() -> None:
    """Alone it waits for no step in flight; 40 tokens and, at first, the prompt are prefilled."""
    story = Story()
    two_turns(story)
    first, second = story.step.intervals
    assert first == Interval(1.0, 105.0, 10.0, 10.0, prefill=100)
    assert second == Interval(1.0, 100 + 10 + 40 + 2.5, 5.0, 6.0, prefill=40)
    (start,) = story.step.firsts
    assert (start.seconds, start.steps, start.prefill) == (10.0, 10, 100)


def test_what_waits_is_in_no_batch() -> None:
    """Two decode: of the second turn's 6 s the other one runs for 3."""
    story = Story()
    two_turns(story, 1)
    assert [each.batch for each in story.step.intervals] == [2.0, 2.0]
    story = Story()
    story.start(0.0, 0, 1)
    for each in (0, 1):
        story.replied(1.0, each, -1)
    story.turned(11.0, 0, 0, 10)
    story.replied(14.0, 0, 0, tokens=40, seconds=3.0)
    story.turned(17.0, 1, 0, 16)
    story.turned(20.0, 0, 1, 15)
    # From 1 to 11 s, from 11 to 17 s (they came together), from 14 to 20 s.
    batches = [each.batch for each in story.step.intervals]
    assert batches == [2.0, pytest.approx((3 * 1 + 3 * 2) / 6), pytest.approx((3 * 2 + 3) / 6)]
    assert [each.steps for each in story.step.intervals][1:] == [6.0, 5.5]


def test_a_first_attempt_leaves_the_engine_when_its_environment_says_so() -> None:
    """Nothing tells before that there is one; those of later steps do not come to the engine."""
    story = Story()
    story.start(0.0, 0, 1)
    assert len(story.reader._lanes[0].running) == 2
    story.replied(1.0, 0, -1)
    story.replied(2.0, 1, -1, engine=1)
    assert [len(lane.running) for lane in story.reader._lanes.values()] == [1, 1]
    story.start(3.0, 2)
    assert [len(lane.running) for lane in story.reader._lanes.values()] == [1, 1]


def test_a_move_while_it_waits_brings_all_of_it_along() -> None:
    story = Story()
    story.start(0.0, 0)
    story.replied(1.0, 0, -1)
    story.turned(11.0, 0, 0, 10)
    moved = ev.AttemptMigrated(attempt=AttemptId(0), engine=EngineId(1), tokens=10)
    story.tell(12.0, moved)
    story.replied(14.0, 0, 0, tokens=40, seconds=3.0, engine=1)
    story.turned(20.0, 0, 1, 15)
    assert story.step.intervals[-1].prefill == 100 + 10 + 40
    assert not story.reader._lanes[0].running


def test_a_response_from_before_an_interruption_has_no_turns() -> None:
    story = Story()
    story.reader._opens = True
    story.start(0.0, 0)
    story.finished(0.0, 0, 77)
    assert (story.tried().turns, story.tried().tokens) == ([], 77)
    assert story.step.intervals == []


@pytest.mark.parametrize("acting", [True, False])
def test_an_episode_that_fails_or_is_stopped_is_over(acting: bool) -> None:
    story = Story()
    story.start(0.0, 0)
    story.replied(1.0, 0, -1)
    if acting:
        story.turned(11.0, 0, 0, 10)
        story.tell(12.0, ev.EpisodeFailed(attempt=AttemptId(0), error="it hung"))
    else:
        story.tell(12.0, ev.AttemptAborted(attempt=AttemptId(0), tokens=8))
    assert not story.tried().decoding
    assert story.tried().acting_s is story.tried().end_s is None
    assert story.tried().tokens == (10 if acting else 8)
    assert not story.reader._lanes[0].running


def test_gradients_run_over_what_environments_put_in() -> None:
    story = Story()
    two_turns(story)
    story.finished(22.5, 0, 15)
    part = GroupPart(prompt=P, start=0, stop=1)
    story.tell(
        23.0,
        ev.AttemptGraded(attempt=AttemptId(0), reward=1.0),
        do.AcceptGroup(prompt=P, attempts=(AttemptId(0),), informative=True),
        do.AccumulateGradients(replica=ReplicaId(0), parts=(part,)),
    )
    done = ev.GradientsAccumulated(replica=ReplicaId(0), parts=(part,), seconds=2.0)
    story.tell(25.0, done)
    (task,) = story.step.tasks
    assert (task.lengths, task.seconds) == ((100 + 15 + 40,), 2.0)


def test_the_driver_works_on_the_ends_of_turns() -> None:
    """One core, which an engine uses while another response decodes there; that one's turn lasts
    from 1 to 31 s."""
    story = Story(cores=1)
    two_turns(story, 1)
    story.turned(31.0, 1, 0, 30)
    assert [each.handled.ended for each in story.step.intervals] == [0, 0, 2]


# --- test unfinished: Responses that were stopped go on, in a simulation, as longer ones did.

CAP = 100
TURNS = st.lists(
    st.builds(ScriptedTurn, st.integers(1, 20), st.floats(0.01, 9.0), st.integers(0, 5)),
    min_size=1,
    max_size=4,
)


def ended(*turns: ScriptedTurn) -> Tried:
    tokens = sum(turn.tokens for turn in turns)
    return replace(nobody(), tokens=tokens, turns=list(turns), end_s=1.0, decoding=False)


def nobody() -> Tried:
    return Tried(PromptId("p"), 0, 0)


def stopped(turns: Turns, tokens: int) -> Tried:
    """While it decoded."""
    one = replace(nobody(), tokens=sum(turn.tokens for turn in turns), turns=list(turns))
    one.stop(5.0, one.tokens + tokens)
    return one


def left_waiting(turns: Turns, seconds: float) -> Tried:
    """While its environment had the word."""
    *before, last = turns
    one = replace(nobody(), turns=list(before), tokens=sum(turn.tokens for turn in before))
    one.end_turn(1.0, one.tokens + last.tokens)
    one.stop(1.0 + seconds, 0)
    return one


def go_on(one: Tried, *others: Tried) -> Turns:
    return gone_on(one, ((), others), CAP, np.random.default_rng(0))


@given(TURNS, st.integers(0, 30), st.lists(TURNS, max_size=5))
def test_one_that_decoded_keeps_what_it_had_and_samples_more(turns, more, others):
    one = stopped(tuple(turns), more)
    found = go_on(one, *(ended(*each) for each in others))
    assert found[: len(turns)] == tuple(turns)
    assert found[len(turns)].tokens >= max(1, more)


@given(TURNS, st.floats(0.01, 12.0), st.lists(TURNS, max_size=5))
def test_one_that_waited_goes_on_waiting(turns, seconds, others):
    one = left_waiting(tuple(turns), seconds)
    found = go_on(one, *(ended(*each) for each in others))
    number = len(turns) - 1
    assert found[:number] == tuple(turns[:-1])
    assert found[number].tokens == turns[-1].tokens
    assert one.waited_s is not None
    assert found[number].tool_s >= one.waited_s
    longest = max((w[number].tool_s for w in others if len(w) > number), default=0.0)
    assert (found[number].tool_s > one.waited_s) == (longest > one.waited_s)


def test_those_of_its_own_step_are_asked_first():
    one = left_waiting((ScriptedTurn(3, 0.0),), 1.0)
    near, far = (
        ended(ScriptedTurn(9, 2.0), ScriptedTurn(1)),
        ended(ScriptedTurn(9, 3.0), ScriptedTurn(2)),
    )
    rng = np.random.default_rng(0)
    assert gone_on(one, ((near,), (near, far)), CAP, rng) == (ScriptedTurn(3, 2.0), ScriptedTurn(1))
    late = left_waiting((ScriptedTurn(3, 0.0),), 2.5)
    assert gone_on(late, ((near,), (near, far)), CAP, rng) == (
        ScriptedTurn(3, 3.0),
        ScriptedTurn(2),
    )


def test_one_that_was_never_begun_is_as_another_one_whatever_began_it():
    other = ended(ScriptedTurn(0, 0.1), ScriptedTurn(7, 1.0), ScriptedTurn(3))
    assert go_on(nobody(), other) == whole(other)


def test_without_an_environment_it_is_as_long_as_a_longer_one():
    long, short = replace(nobody(), tokens=50), replace(nobody(), tokens=5)
    assert go_on(stopped((), 7), long, short) == (ScriptedTurn(50),)
    assert go_on(stopped((), 70), long, short) == (ScriptedTurn(CAP),)
    assert go_on(nobody(), short) == whole(short)
