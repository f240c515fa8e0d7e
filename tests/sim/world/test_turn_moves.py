"""Attempts whose environments are at work, stopped and moved from engine to engine."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_turns import TWO_TURNS, Flat

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.policy.engines.fleet import colocated, grid
from rollpacker.sim.costs.costs import TrainCosts
from rollpacker.sim.workload.workload import ScriptedTurn, Turns, TurnScript
from rollpacker.sim.world.agenda import Agenda
from rollpacker.sim.world.machines import WorldCosts
from rollpacker.sim.world.step import SimulatedAttempt, SimulatedStep
from rollpacker.sim.world.worker import SimWorker
from rollpacker.sim.world.world import SimulatedDecoding

CAP = 1000


class Bench:
    """Engines on an agenda, and a policy that lets attempts go on where they are."""

    def __init__(self, workers: int = 2) -> None:
        self.agenda = Agenda()
        self.lines: list[tuple[float, ev.Event]] = []
        self.engines = {EngineId(n): self.hire(n) for n in range(workers)}
        costs = WorldCosts(
            fleet=colocated(grid(workers, workers), tensor_parallel=1, replica=1),
            engine=lambda _devices: Flat(),
            train=TrainCosts(0.0, 1.0),
        )
        self.decoding = SimulatedDecoding(
            self.agenda,
            self.engines,
            costs=costs,
            cap=CAP,
            touch=self.touch,
            post=self.post,
            settle=lambda: None,
        )
        self.step = SimulatedStep(number=0, start_s=0.0)
        self.decoding.begin(self.step)

    def hire(self, number: int) -> SimWorker:
        return SimWorker(
            number,
            self.agenda,
            Flat(),
            devices=1,
            max_running=8,
            on_ended=self.ended,
            on_accumulated=lambda id_, task: None,
        )

    def touch(self, worker: SimWorker) -> SimWorker:
        self.agenda.after(0.0, worker.settle)
        return worker

    def ended(self, worker, done, stopped) -> None:
        self.touch(self.engines[worker])
        self.decoding.ended(done, stopped)

    def post(self, *events: ev.Event) -> None:
        for event in events:
            self.lines.append((self.agenda.now, event))
            match event:
                case ev.TurnFinished():
                    self.decoding.step_environment(do.StepEnvironment(attempt=event.attempt))
                case ev.EnvironmentReplied():
                    engine = self.step.attempts[event.attempt].engine
                    go_on = do.ContinueAttempt(attempt=event.attempt, engine=engine)
                    self.decoding.go_on(go_on)
                case _:
                    pass

    def start(self, id_: int = 0, turns: Turns = TWO_TURNS, engine: int = 0) -> SimulatedAttempt:
        course = TurnScript(AttemptId(id_), "p", 100, turns)
        attempt = SimulatedAttempt(PromptId("p"), id_, EngineId(engine), course)
        self.step.attempts[AttemptId(id_)] = attempt
        self.decoding.start(attempt)
        return attempt

    def move(self, at: float, target: int, id_: int = 0) -> None:
        self.agenda.at(at, lambda: self._move(AttemptId(id_), EngineId(target)))

    def _move(self, id_: AttemptId, target: EngineId) -> None:
        attempt = self.step.attempts[id_]
        if not (attempt.decoding or attempt.acting) or attempt.stopping:
            return
        source = attempt.target or attempt.engine
        move = do.MigrateAttempts(attempts=(id_,), source=source, target=target)
        self.decoding.migrate(move)
        self.decoding.send()

    def abort(self, at: float, id_: int = 0) -> None:
        self.agenda.at(at, lambda: self._abort(self.step.attempts[AttemptId(id_)]))

    def _abort(self, attempt: SimulatedAttempt) -> None:
        if (attempt.decoding or attempt.acting) and not attempt.stopping:
            self.decoding.abort(attempt)
            self.decoding.send()

    def run(self) -> None:
        while self.agenda.run_next():
            pass

    def of(self, kind: type) -> list[tuple[float, ev.Event]]:
        return [(pytest.approx(now), event) for now, event in self.lines if type(event) is kind]

    def ends(self) -> list[tuple]:
        found = [(now, e.attempt, e.tokens) for now, e in self.lines if type(e) in ENDS]
        return [(pytest.approx(now), attempt, tokens) for now, attempt, tokens in found]


ENDS = (ev.AttemptFinished, ev.AttemptAborted)


def moved(engine: int, tokens: int) -> ev.AttemptMigrated:
    return ev.AttemptMigrated(attempt=AttemptId(0), engine=EngineId(engine), tokens=tokens)


def test_a_move_while_it_waits_is_done_at_once_and_prefills_all() -> None:
    """Another one decodes there: the move does not wait for the end of its step."""
    bench = Bench()
    bench.start()
    bench.start(1, (ScriptedTurn(30),))
    bench.move(13.3, 1)
    bench.run()
    assert bench.of(ev.AttemptMigrated) == [(13.3, moved(1, 10))]
    assert bench.ends() == [(16.0 + 1.6 + 4.0, 0, 14), (31.0, 1, 30)]
    source, target = (worker.end_step() for worker in bench.engines.values())
    assert (source.tool_wait_s, target.tool_wait_s) == (0.0, pytest.approx(2.7))
    assert (source.generated_tokens, target.generated_tokens) == (40, 4)


def test_both_engines_waited_for_the_tools() -> None:
    bench = Bench()
    bench.start()
    bench.move(13.0, 1)
    bench.run()
    waited = [worker.end_step().tool_wait_s for worker in bench.engines.values()]
    assert waited == [pytest.approx(2.0), pytest.approx(3.0)]


def test_a_move_there_and_back_finds_its_kv_and_is_answered_once() -> None:
    bench = Bench()
    bench.start()
    bench.move(12.0, 1)
    bench.move(14.0, 0)
    bench.run()
    assert bench.ends() == [(16.0 + 0.5 + 4.0, 0, 14)]
    assert len(bench.of(ev.EnvironmentReplied)) == 1


def test_a_move_in_the_step_that_ends_a_turn_waits_there() -> None:
    bench = Bench()
    bench.start()
    bench.move(10.5, 1)
    bench.run()
    kinds = [type(event).__name__ for now, event in bench.lines if now == 11.0]
    assert kinds == ["AttemptMigrated", "TurnFinished"]
    assert bench.of(ev.AttemptMigrated) == [(11.0, moved(1, 10))]
    assert bench.ends() == [(16.0 + 1.6 + 4.0, 0, 14)]


def test_a_stop_in_the_step_that_ends_a_turn_counts_the_turn() -> None:
    bench = Bench(1)
    bench.start()
    bench.abort(10.5)
    bench.run()
    assert bench.ends() == [(11.0, 0, 10)]
    assert bench.of(ev.TurnFinished) == []
    assert bench.engines[EngineId(0)].idle


def test_an_abort_while_it_waits_takes_effect_at_once() -> None:
    bench = Bench(1)
    bench.start()
    bench.start(1, (ScriptedTurn(30),))
    bench.abort(13.3)
    bench.run()
    assert bench.ends() == [(13.3, 0, 10), (31.0, 1, 30)]


def test_an_abort_of_one_that_has_not_begun() -> None:
    bench = Bench(1)
    bench.start(turns=(ScriptedTurn(0, 5.0), ScriptedTurn(3)))
    bench.abort(1.0)
    bench.run()
    assert bench.ends() == [(1.0, 0, 0)]
    assert bench.engines[EngineId(0)].end_step().tool_wait_s == pytest.approx(1.0)


SECONDS = st.sampled_from([0.0, 0.3, 2.0, 7.5])


@dataclass(frozen=True)
class Told:
    """What is done to an attempt."""

    at: float
    attempt: int
    target: int
    stop: bool


@st.composite
def responses(draw) -> Turns:
    count = draw(st.integers(1, 4))
    tokens = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    made = [ScriptedTurn(n, draw(SECONDS), draw(st.integers(0, 30))) for n in tokens]
    return (*([ScriptedTurn(0, draw(SECONDS))] if draw(st.booleans()) else []), *made)


WHAT = st.builds(
    Told,
    at=st.floats(0.0, 60.0),
    attempt=st.integers(0, 4),
    target=st.integers(0, 2),
    stop=st.sampled_from([False, False, True]),
)


@given(st.lists(responses(), min_size=1, max_size=5), st.lists(WHAT, max_size=12))
def test_whatever_is_done_every_turn_is_told_and_every_attempt_ends_once(made, told) -> None:
    bench = Bench(3)
    attempts = [bench.start(at, turns, at % 3) for at, turns in enumerate(made)]
    for each in told:
        if each.attempt < len(made):
            bench.abort(each.at, each.attempt) if each.stop else bench.move(
                each.at, each.target, each.attempt
            )
    bench.run()
    work = [worker.end_step() for worker in bench.engines.values()]
    assert all(worker.idle for worker in bench.engines.values())
    ends = {event.attempt: event for _, event in bench.lines if type(event) in ENDS}
    assert len([event for _, event in bench.lines if type(event) in ENDS]) == len(made)
    for attempt, turns in zip(attempts, made, strict=True):
        check_turns(bench, attempt, turns, isinstance(ends[attempt.course.attempt], ENDS[0]))
    assert sum(each.generated_tokens for each in work) == sum(e.tokens for e in ends.values())


def check_turns(bench: Bench, attempt: SimulatedAttempt, turns: Turns, finished: bool) -> None:
    """What was told of its turns, in order: all of them, unless it was stopped."""
    mine = [(t, e) for t, e in bench.lines if getattr(e, "attempt", None) == attempt.course.attempt]
    wanted: list[tuple] = []
    opening = int(not turns[0].tokens)
    sums = np.cumsum([turn.tokens for turn in turns]).tolist()
    for place, (turn, tokens) in enumerate(zip(turns, sums, strict=True)):
        last = place + 1 == len(turns)
        if turn.tokens and (not last or turn.tool_s):
            wanted.append(("turned", place - opening, tokens))
        if not last:
            wanted.append(("replied", place - opening, turn.added))
    told = [
        ("turned" if isinstance(e, ev.TurnFinished) else "replied", e.turn, e.tokens)
        for _, e in mine
        if isinstance(e, ev.TurnFinished | ev.EnvironmentReplied)
    ]
    assert told == wanted[: len(told)]
    assert len(told) == len(wanted) or not finished
    check_waits(mine)


def check_waits(mine: list[tuple[float, ev.Event]]) -> None:
    """An answer comes after its seconds, wherever the attempt has moved in between."""
    since = 0.0
    for now, event in mine:
        if isinstance(event, ev.TurnFinished):
            since = now
        elif isinstance(event, ev.EnvironmentReplied):
            assert now - since == pytest.approx(event.seconds)
