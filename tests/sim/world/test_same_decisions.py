"""The real runtime on a virtual clock against the simulator: the same journal from both."""

from collections import Counter

import pytest
from hypothesis import given, reject, settings
from job_scripts import MODES, TALKING, script, scripts
from msgspec.structs import replace
from scripted_job import Script, simulate
from virtual_runtime import run_runtime

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import RoundKind

Line = tuple[float, ev.Event, list[do.Decision]]
FREED = {"scaling": "fixed", "scaling_fraction": 0.5, "group_tokens": 64}
CLOSE = 1e-9
"""Seconds: the simulator sums decode steps in closed form, the runtime one by one."""


def plain(line):
    """A journal's line without its times, which are compared apart."""
    _, event, made = line
    if isinstance(event, ev.GradientsAccumulated):
        event = replace(event, seconds=0.0)
    return event, made


def same(real, ours) -> bool:
    return plain(real) == plain(ours) and real[0] == pytest.approx(ours[0], rel=CLOSE, abs=CLOSE)


def show(line) -> str:
    now, event, made = line
    return f"{now:.9f} {event} -> {made[:4]}{'...' if made[4:] else ''}"


def instant(lines, now) -> list[str]:
    """What happened at one time, in any order."""
    return sorted(repr(plain(line)[0]) for line in lines if abs(line[0] - now) < 1e-7)


def first_difference(runtime, simulated) -> int | None:
    for place, (real, ours) in enumerate(zip(runtime, simulated, strict=False)):
        if not same(real, ours):
            return place
    assert len(runtime) == len(simulated)
    return None


def assert_same(script: Script, *, ties: bool = False) -> list[Line]:
    """The simulator's lines; fails at the first difference.

    Two processes that report at the same instant have no order of their own: with ``ties``, a job
    in which the two drivers broke such a tie differently is passed over.
    """
    runtime, all_lines = run_runtime(script).journal.lines, simulate(script).lines
    # Only simulated engines span several devices, so only they report to their planner.
    assert not any(made for _, event, made in all_lines if isinstance(event, ev.RoundMeasured))
    simulated = [line for line in all_lines if not isinstance(line[1], ev.RoundMeasured)]
    place = first_difference(runtime, simulated)
    if place is None:
        return all_lines
    real, ours = runtime[place], simulated[place]
    tied = abs(real[0] - ours[0]) < 1e-7 and plain(real)[0] != plain(ours)[0]
    if ties and tied and instant(runtime, real[0]) == instant(simulated, real[0]):
        reject()
    before = "\n  ".join(map(show, runtime[max(0, place - 3) : place]))
    raise AssertionError(f"line {place}\n  {before}\nRUNTIME {show(real)}\nSIM     {show(ours)}")


def decided(lines: list[Line]) -> Counter:
    """How often the simulator decided what."""
    return Counter(type(made).__name__ for _, _, all_ in lines for made in all_)


THREE = {"sizes": {"a": 31, "b": 23, "c": 9}, "kinds": {"a": "math", "b": "judge", "c": "math"}}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode: str) -> None:
    assert_same(script(mode))


@pytest.mark.parametrize("mode", MODES)
def test_domains_with_a_slow_judge(mode: str) -> None:
    assert_same(script(mode, prompts=7, steps=8, judge_slots=2, **THREE))


def test_long_rounds() -> None:
    lines = assert_same(script("race", steps=10, sizes={"a": 60}))
    kinds = Counter(made.round for _, _, all_ in lines for made in all_ if is_round(made))
    assert kinds[RoundKind.SHORT] > 2
    assert kinds[RoundKind.LONG] > 1


def is_round(decision) -> bool:
    return isinstance(decision, do.BeginRound)


def test_moving_the_tail() -> None:
    given = script("exact", streaming=FREED, workers=4)
    assert decided(assert_same(given))["MigrateAttempts"] > 8


def test_dynamic_sampling_with_and_without_a_race() -> None:
    for mode in ("exact", "race"):
        given = script(mode, sampling={"enabled": True}, responses=2, steps=6)
        counts = decided(assert_same(given))
        assert counts["DropGroup"] > 5
        assert counts["DrawPrompts"] > 6


def test_nothing_to_train_on() -> None:
    """Groups of one response have no variance: the step ends without an update."""
    assert_same(script("exact", sampling={"enabled": True, "max_draws": 2}, responses=1, steps=3))


def test_audits() -> None:
    assert_same(script("race", tail={"audit_every": 2, "audit_prompts": 3}, steps=10))


def test_gradients_in_order_and_several_updates() -> None:
    assert_same(script("exact", ordered=True))
    assert_same(script("exact", updates=3))


def test_engines_that_are_full() -> None:
    assert_same(script("race", concurrency=3, workers=2))


def test_one_worker() -> None:
    assert_same(script("race", workers=1))


@pytest.mark.parametrize("mode", TALKING)
def test_turns_with_an_environment(mode: str) -> None:
    counts = decided(assert_same(script(mode, tools=True)))
    assert counts["StepEnvironment"] > counts["StartAttempt"]
    assert counts["ContinueAttempt"] > counts["StartAttempt"]


def test_moving_a_tail_that_waits_for_its_environments() -> None:
    lines = assert_same(script("exact", streaming=FREED, workers=4, tools=True))
    assert decided(lines)["MigrateAttempts"] > 8


def test_what_moves_within_a_turn_is_cut_at_the_cap_too() -> None:
    given = script("exact", streaming=FREED, workers=4, cap=61, tools=True)
    moved, cut = set(), set()
    for _, event, _ in assert_same(given):
        if isinstance(event, ev.AttemptMigrated):
            moved.add(event.attempt)
        elif isinstance(event, ev.TurnFinished) and event.finish_reason == "length":
            cut.add(event.attempt)
    assert len(moved & cut) > 8


def test_aborting_what_waits_for_its_environment() -> None:
    lines = assert_same(script("race", tools=True, steps=10))
    waits = {}
    for now, event, made in lines:
        waits |= {d.attempt: now for d in made if isinstance(d, do.StepEnvironment)}
        if isinstance(event, ev.EnvironmentReplied):
            waits.pop(event.attempt, None)
    ends = {e.attempt for _, e, _ in lines if isinstance(e, ev.AttemptAborted)}
    assert len(ends & set(waits)) > 8


@settings(max_examples=settings().max_examples // 6)
@given(scripts())
def test_any_job(script: Script) -> None:
    assert_same(script, ties=True)
