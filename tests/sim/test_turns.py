"""Responses of several turns: exact times, KV between turns, aborts and moves during tool calls."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from job_scripts import script, scripts
from scripted_job import Script, ScriptedWorkload
from test_world import Run, check_once, check_step

from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, Prompt, PromptId
from rollpacker.policy.fleet import colocated, grid
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.sim.agenda import Agenda
from rollpacker.sim.costs import BLOCK_SLACK, TrainCosts
from rollpacker.sim.course import Course, Turn, Turns
from rollpacker.sim.decoder import Decoder
from rollpacker.sim.machines import WorldCosts
from rollpacker.sim.sequences import Request, ToolKv
from rollpacker.sim.worker import SimWorker
from rollpacker.sim.world import World

STEP_S = 1.0
PREFILL_S = 0.01


@dataclass(frozen=True)
class Flat:
    """A second for every step, whatever it decodes."""

    capacity: float = 1e9

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
        cap=1000,
        record=lambda now, event, made: lines.append((now, event)),
    )
    return world.run_step(0), lines


TWO_TURNS: Turns = (Turn(10, tool_s=5.0, added=50), Turn(4))


def test_a_turn_its_tools_and_the_next_turn() -> None:
    """Prompt 1 s, 10 steps, tools 5 s, 50 new tokens 0.5 s, 4 steps."""
    result, lines = world_of([TWO_TURNS, (Turn(3),)])
    ends = {e.attempt: (now, e.tokens) for now, e in lines if isinstance(e, ev.AttemptFinished)}
    assert ends == {1: (4.0, 3), 0: (pytest.approx(20.5), 14)}
    assert result.rollout_s == pytest.approx(20.5)
    assert (result.tool_wait_s, result.longest_tool_s) == (pytest.approx(5.0), 5.0)
    assert result.decoded_tokens == result.kept_tokens == 17


def test_gradients_run_over_what_tools_put_in() -> None:
    result, _ = world_of([TWO_TURNS, (Turn(3),)])
    assert result.train_s == pytest.approx(2 * 200 + 14 + 50 + 3)
    assert result.step_s == pytest.approx(result.rollout_s + result.train_s)
    assert result.bubble == pytest.approx(0.0, abs=1e-9)


def test_nothing_cached_is_prefilled_again() -> None:
    """160 tokens of context; while another response holds the prompt, 60 of them."""
    alone, _ = world_of([TWO_TURNS, (Turn(3),)], tool_kv="dropped")
    assert alone.rollout_s == pytest.approx(1.0 + 10.0 + 5.0 + 1.6 + 4.0)
    # The other response decodes all the while; it is frozen by the prefill at a step's end.
    shared, lines = world_of([TWO_TURNS, (Turn(30),)], tool_kv="dropped")
    ends = {e.attempt: now for now, e in lines if isinstance(e, ev.AttemptFinished)}
    assert ends == {0: pytest.approx(16.0 + 0.6 + 4.0), 1: pytest.approx(1.0 + 30.0 + 0.6)}
    assert shared.tool_wait_s == 0.0


def test_tools_that_answer_during_a_step_wait_for_its_end() -> None:
    turns: Turns = (Turn(10, tool_s=4.3, added=0), Turn(4))
    _, lines = world_of([turns, (Turn(30),)])
    ends = {e.attempt: now for now, e in lines if isinstance(e, ev.AttemptFinished)}
    assert ends == {0: pytest.approx(16.0 + 4.0), 1: pytest.approx(31.0)}


def test_an_abort_during_a_tool_call_takes_effect_at_once() -> None:
    """The third response has 10 tokens and waits when the race is over."""
    waits: Turns = (Turn(10, tool_s=500.0), Turn(400))
    race = {"eta_prompts": 1.0, "eta_responses": 1.5}
    result, lines = world_of([waits, (Turn(20),), (Turn(30),)], "race", **race)
    aborted = [(now, e.tokens) for now, e in lines if isinstance(e, ev.AttemptAborted)]
    assert aborted == [(pytest.approx(31.0), 10)]
    assert result.rollout_s == pytest.approx(31.0)
    assert (result.samples, result.decoded_tokens) == (2, 60)


class Bench:
    """Workers on an agenda."""

    def __init__(self, workers: int = 2) -> None:
        self.agenda = Agenda()
        self.done: list[tuple[float, int, int]] = []
        self.stopped: list[tuple[float, int, dict]] = []
        self.workers = [
            SimWorker(
                n,
                self.agenda,
                Flat(),
                devices=1,
                max_running=8,
                on_ended=self.ended,
                on_turn=lambda id_: self.agenda.after(0.0, self.workers[id_].settle),
                on_accumulated=lambda id_, task: None,
            )
            for n in range(workers)
        ]

    def ended(self, worker, done, stopped) -> None:
        now = self.agenda.now
        self.done += [(now, worker, attempt) for attempt in done]
        if stopped:
            self.stopped.append((now, worker, dict(stopped)))
        self.workers[worker].settle()

    def submit(self, worker: int, course: Course) -> None:
        self.workers[worker].submit(course)
        self.workers[worker].settle()

    def stop(self, worker: int, attempt: int) -> None:
        self.workers[worker].stop([AttemptId(attempt)])
        self.workers[worker].settle()

    def run(self) -> None:
        while self.agenda.run_next():
            pass


def course(attempt: int = 0, turns: Turns = TWO_TURNS) -> Course:
    return Course(AttemptId(attempt), "p", 100, turns)


def test_a_move_during_a_tool_call_waits_on_and_prefills_all() -> None:
    bench, moved = Bench(), course()
    bench.submit(0, moved)
    bench.agenda.at(13.0, lambda: bench.stop(0, 0))
    bench.agenda.at(14.0, lambda: bench.submit(1, moved))
    bench.run()
    assert bench.stopped == [(13.0, 0, {0: 10})]
    assert bench.done == [(pytest.approx(16.0 + 1.6 + 4.0), 1, 0)]
    source, target = (worker.end_step() for worker in bench.workers)
    assert (source.tool_wait_s, target.tool_wait_s) == (pytest.approx(2.0), pytest.approx(2.0))
    assert (source.generated_tokens, target.generated_tokens) == (10, 4)


def test_a_move_after_the_tools_have_answered_goes_on_at_once() -> None:
    bench, moved = Bench(), course()
    bench.submit(0, moved)
    bench.agenda.at(13.0, lambda: bench.stop(0, 0))
    bench.agenda.at(30.0, lambda: bench.submit(1, moved))
    bench.run()
    assert bench.done == [(pytest.approx(30.0 + 1.6 + 4.0), 1, 0)]


def test_a_move_there_and_back_finds_its_kv_and_answers_once() -> None:
    bench, moved = Bench(), course()
    bench.submit(0, moved)
    for at, worker in ((12.0, 0), (14.0, 1)):
        bench.agenda.at(at, lambda worker=worker: bench.stop(worker, 0))
    for at, worker in ((13.0, 1), (15.0, 0)):
        bench.agenda.at(at, lambda worker=worker: bench.submit(worker, moved))
    bench.run()
    assert bench.done == [(pytest.approx(16.0 + 0.5 + 4.0), 0, 0)]


def test_a_stop_in_the_step_that_ends_a_turn_counts_the_turn() -> None:
    bench = Bench(1)
    bench.submit(0, course())
    bench.agenda.at(10.5, lambda: bench.stop(0, 0))
    bench.run()
    assert bench.stopped == [(11.0, 0, {0: 10})]
    assert bench.done == []
    assert bench.workers[0].idle


def drain(decoder: Decoder, now: float) -> float:
    at = decoder.next_event(now)
    while at is not None:
        now = at
        decoder.advance(now)
        at = decoder.next_event(now)
    return now


def prefilled(decoder: Decoder, now: float, request: Request) -> int:
    """Tokens that are prefilled when it is submitted to an idle engine."""
    before = decoder.busy_s
    decoder.submit(now, request)
    decoder.next_event(now)
    return round((decoder.busy_s - before) / PREFILL_S)


FIRST = Request(0, "a", 100, 20, returns=True)
SECOND = Request(0, "a", 100, 5, earlier=50)
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
        decoder.submit(now, Request(1, "b", other - 10, 10))
        now = drain(decoder, now)
    assert prefilled(decoder, now, SECOND) == 150 - found


@pytest.mark.parametrize(("tool_kv", "waits"), [("cached", 0), ("kept", 1)])
def test_what_is_kept_admits_nothing_in_its_place(tool_kv: ToolKv, waits: int) -> None:
    decoder = Decoder(Flat(capacity=1000.0), max_running=8, tool_kv=tool_kv)
    decoder.submit(0.0, FIRST)
    decoder.submit(0.0, Request(2, "c", 300, 200))
    first = decoder.next_event(0.0)
    assert first is not None
    assert decoder.advance(first) == [(0, 20)]
    decoder.submit(first, Request(1, "b", 550, 10))
    decoder.next_event(first)
    assert decoder.waiting == waits


class Split(ScriptedWorkload):
    """The scripted lengths, in turns with tools that add nothing."""

    def turns(self, step, prompt, index) -> Turns:
        ((tokens, _, _),) = super().turns(step, prompt, index)
        rng = np.random.default_rng([step, index, tokens, len(prompt)])
        count = int(rng.integers(1, min(4, tokens) + 1))
        cuts = np.sort(rng.choice(np.arange(1, tokens), count - 1, replace=False))
        parts = np.diff([0, *cuts, tokens]).tolist()
        waits = rng.choice([0.0, 0.013, 0.4, 3.0], count - 1).tolist()
        return (*map(Turn, parts[:-1], waits), Turn(parts[-1]))


class SplitRun(Run):
    workload = Split


@settings(max_examples=settings().max_examples // 4)
@given(scripts())
def test_any_job_with_tools_keeps_its_promises(given_script: Script) -> None:
    run = SplitRun(given_script)
    check_once(run)
    for step in run.steps():
        check_step(step)


def test_the_tail_moves_while_it_waits_for_tools() -> None:
    moved = 0
    for step in SplitRun(script("exact", workers=4)).steps():
        check_step(step)
        moved += sum(len(stays) > 1 for stays in step.stays.values())
    assert moved > 0
