"""Responses of a run in its simulation: those that were stopped go on as longer ones did."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from rollpacker.core.attempts import RecordedAttempt
from rollpacker.sim.recorded.rerun import Tried, gone_on, tried, whole
from rollpacker.sim.workload.workload import ScriptedTurn, Turns


def begun() -> RecordedAttempt:
    """Attempt that began at 1 s after its environment did, and sampled 10 tokens until 11 s."""
    attempt = RecordedAttempt(0, "p", 0, 0.0, 0, ((0, 0.0),), since_s=0.0)
    attempt.answer(1.0, 0)
    attempt.go_on(1.0, 0)
    attempt.end_turn(11.0, 10)
    return attempt


OPENED = ScriptedTurn(0, 1.0)


def test_turns_are_kept_with_their_waits() -> None:
    attempt = begun()
    attempt.answer(3.0, 40)
    attempt.go_on(14.0, 0)
    attempt.end_turn(20.0, 15)
    attempt.end(22.5, {"kind": "AttemptFinished", "tokens": 15, "finish_reason": "stop"})
    turns = (OPENED, ScriptedTurn(10, 3.0, 40), ScriptedTurn(5, 2.5))
    assert tried(attempt, acts=True) == Tried(turns, 15, ended=True)


@pytest.mark.parametrize("kind", ["AttemptAborted", "EpisodeFailed"])
def test_one_that_is_stopped_while_its_environment_acts_has_waited(kind: str) -> None:
    attempt = begun()
    attempt.end(12.5, {"kind": kind})
    assert tried(attempt, acts=True) == Tried((OPENED, ScriptedTurn(10)), 10, waited_s=1.5)


def test_one_that_is_stopped_while_it_decodes_has_no_turn_of_it() -> None:
    attempt = begun()
    attempt.answer(3.0, 40)
    attempt.go_on(14.0, 0)
    attempt.end(16.0, {"kind": "AttemptAborted", "tokens": 12})
    turns = (OPENED, ScriptedTurn(10, 3.0, 40))
    assert tried(attempt, acts=True) == Tried(turns, 12)


def test_one_that_is_stopped_before_its_environment_began_has_waited_for_that() -> None:
    attempt = RecordedAttempt(0, "p", 0, 2.0, 0, ((0, 2.0),), since_s=2.0)
    attempt.end(3.0, {"kind": "AttemptAborted", "tokens": 0})
    assert tried(attempt, acts=True) == Tried(waited_s=1.0)
    assert tried(attempt, acts=False) == Tried()


def test_a_response_from_before_an_interruption_has_no_turns() -> None:
    attempt = RecordedAttempt(0, "p", 0, 0.0, 0, ((0, 0.0),), since_s=0.0)
    attempt.end(0.0, {"kind": "AttemptFinished", "tokens": 77, "finish_reason": "stop"})
    assert tried(attempt, acts=True) == Tried(tokens=77, ended=True)


CAP = 100
TURNS = st.lists(
    st.builds(ScriptedTurn, st.integers(1, 20), st.floats(0.01, 9.0), st.integers(0, 5)),
    min_size=1,
    max_size=4,
)


def ended(*turns: ScriptedTurn) -> Tried:
    return Tried(turns, sum(turn.tokens for turn in turns), ended=True)


def stopped(turns: Turns, tokens: int) -> Tried:
    """While it decoded."""
    return Tried(turns, sum(turn.tokens for turn in turns) + tokens)


def left_waiting(turns: Turns, seconds: float) -> Tried:
    """While its environment had the word."""
    *before, last = turns
    turns = (*before, ScriptedTurn(last.tokens))
    return Tried(turns, sum(turn.tokens for turn in turns), waited_s=seconds)


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
    assert go_on(Tried(), other) == whole(other)


def test_without_an_environment_it_is_as_long_as_a_longer_one():
    long, short = Tried(tokens=50), Tried(tokens=5)
    assert go_on(stopped((), 7), long, short) == (ScriptedTurn(50),)
    assert go_on(stopped((), 70), long, short) == (ScriptedTurn(CAP),)
    assert go_on(Tried(), short) == whole(short)
