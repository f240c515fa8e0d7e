"""Responses that were stopped go on, in a simulation, as longer ones did."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from rollpacker.core.types import PromptId
from rollpacker.sim.recorded.rerun import gone_on, whole
from rollpacker.sim.recorded.run_lanes import Tried
from rollpacker.sim.workload.turn_script import ScriptedTurn, Turns

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
