"""Responses of several turns: exact times, KV between turns, aborts and moves during tool calls."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from job_scripts import TALKING, script, scripts
from scripted_job import Script, ScriptedWorkload, simulate
from test_world import Run, check_once, check_step

from rollpacker.core import events as ev
from rollpacker.core.journal import JournalWriter, replay
from rollpacker.core.types import AttemptId, FinishReason, Prompt, PromptId
from rollpacker.policy.engines.fleet import colocated, grid
from rollpacker.policy.rollout import RolloutPolicy, from_journal
from rollpacker.sim.costs.costs import BLOCK_SLACK, TrainCosts
from rollpacker.sim.workload.workload import ScriptedTurn, SimulatedRequest, ToolKv, Turns
from rollpacker.sim.world.decoder import Decoder
from rollpacker.sim.world.machines import WorldCosts
from rollpacker.sim.world.world import World

STEP_S = 1.0
PREFILL_S = 0.01


@dataclass(frozen=True)
class Flat:
    """A second for every step, whatever it decodes."""

    capacity: float = 1e9
    slack: float = 8.0

    def step_s(self, batch: int, context_tokens: float) -> float:
        return STEP_S

    @property
    def slope(self) -> float:
        return 0.0

    def prefill_s(self, tokens: float) -> float:
        return PREFILL_S * tokens


class Scripted:
    """One prompt of 100 tokens whose responses are given."""

    prompt_tokens = 100

    def __init__(self, responses: list[Turns]) -> None:
        self._responses = responses

    def remaining(self) -> dict[str, int]:
        return {"default": 10**6}

    def draw(self, counts) -> tuple[Prompt, ...]:
        return (Prompt(id=PromptId("p"), domain="default", tokens=100),)

    def turns(self, step, prompt, index) -> Turns:
        return self._responses[index]

    def reward(self, step, prompt, index) -> float:
        return float(index % 2)

    def domain(self, prompt) -> str:
        return "default"

    def run_s(self, step, prompt, index) -> float:
        return 0.0

    def forget(self, prompt) -> None:
        pass


def world_of(responses: list[Turns], mode: str = "off", tool_kv: ToolKv = "cached", **tail):
    """One step of one prompt on one worker; its result and its journal."""
    given_script = Script(
        rollout={
            "prompts_per_step": 1,
            "num_generations": 2,
            "tail_batching": {"mode": mode, "audit_every": 0, **tail},
        },
        sizes={"default": 1},
        lengths=[1],
        cap=1000,
        steps=1,
        workers=1,
    )
    costs = WorldCosts(
        fleet=colocated(grid(1, 1), tensor_parallel=1, replica=1),
        engine=lambda _devices: Flat(),
        train=TrainCosts(0.0, 1.0),
        tool_kv=tool_kv,
    )
    lines: list[tuple] = []
    world = World(
        RolloutPolicy(given_script.settings()),
        Scripted(responses),
        costs,
        record=lambda now, event, made: lines.append((now, event)),
    )
    return world.run_step(0), lines


TWO_TURNS: Turns = (ScriptedTurn(10, tool_s=5.0, added=50), ScriptedTurn(4))


def test_a_turn_its_tools_and_the_next_turn() -> None:
    """Prompt 1 s, 10 steps, tools 5 s, 50 new tokens 0.5 s, 4 steps."""
    result, lines = world_of([TWO_TURNS, (ScriptedTurn(3),)])
    ends = {e.attempt: (now, e.tokens) for now, e in lines if isinstance(e, ev.AttemptFinished)}
    assert ends == {1: (4.0, 3), 0: (pytest.approx(20.5), 14)}
    assert result.rollout_s == pytest.approx(20.5)
    assert (result.tool_wait_s, result.longest_tool_s) == (pytest.approx(5.0), 5.0)
    assert result.decoded_tokens == result.kept_tokens == 17


def test_gradients_run_over_what_tools_put_in() -> None:
    result, _ = world_of([TWO_TURNS, (ScriptedTurn(3),)])
    assert result.train_s == pytest.approx(2 * 200 + 14 + 50 + 3)
    assert result.step_s == pytest.approx(result.rollout_s + result.train_s)
    assert result.bubble == pytest.approx(0.0, abs=1e-9)


def test_nothing_cached_is_prefilled_again() -> None:
    """160 tokens of context; while another response holds the prompt, 60 of them."""
    alone, _ = world_of([TWO_TURNS, (ScriptedTurn(3),)], tool_kv="dropped")
    assert alone.rollout_s == pytest.approx(1.0 + 10.0 + 5.0 + 1.6 + 4.0)
    # The other response decodes all the while; it is frozen by the prefill at a step's end.
    shared, lines = world_of([TWO_TURNS, (ScriptedTurn(30),)], tool_kv="dropped")
    ends = {e.attempt: now for now, e in lines if isinstance(e, ev.AttemptFinished)}
    assert ends == {0: pytest.approx(16.0 + 0.6 + 4.0), 1: pytest.approx(1.0 + 30.0 + 0.6)}
    assert shared.tool_wait_s == 0.0


def test_tools_that_answer_during_a_step_wait_for_its_end() -> None:
    turns: Turns = (ScriptedTurn(10, tool_s=4.3, added=0), ScriptedTurn(4))
    _, lines = world_of([turns, (ScriptedTurn(30),)])
    ends = {e.attempt: now for now, e in lines if isinstance(e, ev.AttemptFinished)}
    assert ends == {0: pytest.approx(16.0 + 4.0), 1: pytest.approx(31.0)}


def test_an_abort_during_a_tool_call_takes_effect_at_once() -> None:
    """The third response has 10 tokens and waits when the race is over."""
    waits: Turns = (ScriptedTurn(10, tool_s=500.0), ScriptedTurn(400))
    race = {"eta_prompts": 1.0, "eta_responses": 1.5}
    result, lines = world_of([waits, (ScriptedTurn(20),), (ScriptedTurn(30),)], "race", **race)
    aborted = [(now, e.tokens) for now, e in lines if isinstance(e, ev.AttemptAborted)]
    assert aborted == [(pytest.approx(31.0), 10)]
    assert result.rollout_s == pytest.approx(31.0)
    assert (result.samples, result.decoded_tokens) == (2, 60)


def drain(decoder: Decoder, now: float) -> float:
    at = decoder.next_event(now)
    while at is not None:
        now = at
        decoder.advance(now)
        at = decoder.next_event(now)
    return now


def prefilled(decoder: Decoder, now: float, request: SimulatedRequest) -> int:
    """Tokens that are prefilled when it is submitted to an idle engine."""
    before = decoder.busy_s
    decoder.submit(now, request)
    decoder.next_event(now)
    return round((decoder.busy_s - before) / PREFILL_S)


FIRST = SimulatedRequest(0, "a", 100, 20, returns=True)
SECOND = SimulatedRequest(0, "a", 100, 5, earlier=50)
"""After 20 tokens and 30 of a tool."""


@pytest.mark.parametrize(
    ("other", "found"),
    [(0, 120), (880 - BLOCK_SLACK, 120), (880, 112), (900, 92), (992, 0)],
)
def test_others_take_the_kv_that_they_need_from_its_end(other: int, found: int) -> None:
    """Of 1000 tokens 120 are cached; another request needs ``other`` and half a block."""
    decoder = Decoder(Flat(capacity=1000.0), max_running=8)
    decoder.submit(0.0, FIRST)
    now = drain(decoder, 0.0)
    if other:
        decoder.submit(now, SimulatedRequest(1, "b", other - 10, 10))
        now = drain(decoder, now)
    assert prefilled(decoder, now, SECOND) == 150 - found


@pytest.mark.parametrize(("tool_kv", "waits"), [("cached", 0), ("kept", 1)])
def test_what_is_kept_admits_nothing_in_its_place(tool_kv: ToolKv, waits: int) -> None:
    decoder = Decoder(Flat(capacity=1000.0), max_running=8, tool_kv=tool_kv)
    decoder.submit(0.0, FIRST)
    decoder.submit(0.0, SimulatedRequest(2, "c", 300, 200))
    first = decoder.next_event(0.0)
    assert first is not None
    assert decoder.advance(first) == [(0, 20)]
    decoder.submit(first, SimulatedRequest(1, "b", 550, 10))
    decoder.next_event(first)
    assert decoder.waiting == waits


def told(lines) -> list[tuple]:
    """Turns that ended and environments that answered, with times."""
    turns = ev.TurnFinished | ev.EnvironmentReplied
    return [(pytest.approx(now), event) for now, event in lines if isinstance(event, turns)]


def turned(turn: int, tokens: int, reason: str = "stop") -> ev.TurnFinished:
    return ev.TurnFinished(
        attempt=AttemptId(0), turn=turn, tokens=tokens, finish_reason=cast(FinishReason, reason)
    )


def replied(turn: int, tokens: int, seconds: float) -> ev.EnvironmentReplied:
    return ev.EnvironmentReplied(attempt=AttemptId(0), turn=turn, tokens=tokens, seconds=seconds)


def test_the_policy_hears_of_turns() -> None:
    _, lines = world_of([TWO_TURNS, (ScriptedTurn(3),)])
    assert told(lines) == [(11.0, turned(0, 10)), (16.0, replied(0, 50, 5.0))]


def test_an_environment_begins_and_hears_of_the_end() -> None:
    """2 s, in which the other one's prompt was prefilled; 10 steps, 5 s, 0.5 s and 4 steps, 3 s."""
    whole: Turns = (ScriptedTurn(0, 2.0), *TWO_TURNS[:1], ScriptedTurn(4, 3.0))
    result, lines = world_of([whole, (ScriptedTurn(3),)])
    assert told(lines) == [
        (2.0, replied(-1, 0, 2.0)),
        (12.0, turned(0, 10)),
        (17.0, replied(0, 50, 5.0)),
        (21.5, turned(1, 14)),
    ]
    (end,) = [
        (now, e.tokens) for now, e in lines if isinstance(e, ev.AttemptFinished) and not e.attempt
    ]
    assert end == (pytest.approx(24.5), 14)
    assert result.rollout_s == pytest.approx(24.5)
    assert result.longest_tool_s == 10.0
    assert result.decoded_tokens == 17


def test_an_environment_hears_of_a_cut() -> None:
    _, lines = world_of(
        [(ScriptedTurn(990), ScriptedTurn(400), ScriptedTurn(7, 3.0)), (ScriptedTurn(3),)]
    )
    (cut,) = [
        event for _, event in told(lines) if isinstance(event, ev.TurnFinished) and event.turn
    ]
    assert cut == turned(1, 1000, "length")
    reasons = [e.finish_reason for _, e in lines if isinstance(e, ev.AttemptFinished)]
    assert reasons == ["stop", "length"]


def test_a_job_with_turns_replays(tmp_path: Path) -> None:
    """Its journal leads to the same decisions."""
    job = script("race", tools=True, steps=4)
    writer = JournalWriter(tmp_path / "journal.jsonl")
    policy = RolloutPolicy(job.settings())
    writer.meta(policy.journal_head())
    for now, event, made in simulate(job).lines:
        writer.record(now, event, made)
    writer.close()
    again = replay(tmp_path / "journal.jsonl", from_journal)
    assert again.events > 500
    assert again.differences == []


class Split(ScriptedWorkload):
    """The scripted lengths, in turns with tools that add nothing."""

    def turns(self, step, prompt, index) -> Turns:
        tokens = sum(turn.tokens for turn in super().turns(step, prompt, index))
        rng = np.random.default_rng([step, index, tokens, len(prompt)])
        count = int(rng.integers(1, min(4, tokens) + 1))
        cuts = np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False))
        parts = np.diff([0, *cuts, tokens]).tolist()
        waits = rng.choice([0.0, 0.013, 0.4, 3.0], count - 1).tolist()
        return (*map(ScriptedTurn, parts[:-1], waits), ScriptedTurn(parts[-1]))


class SplitRun(Run):
    workload = Split


@settings(max_examples=settings().max_examples // 4)
@given(scripts())
def test_any_job_with_tools_keeps_its_promises(given_script: Script) -> None:
    assume(given_script.rollout["tail_batching"]["mode"] in TALKING)
    run = SplitRun(given_script)
    check_once(run)
    for step in run.steps():
        check_step(step)


def test_the_tail_moves_while_it_waits_for_tools() -> None:
    moved = 0
    for step in SplitRun(script("exact", workers=4)).steps():
        check_step(step)
        moved += step.waiting_moves
    assert moved > 0
