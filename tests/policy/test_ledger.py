"""The round's record: every attempt is on one engine, whatever happens to it."""

from __future__ import annotations

from collections import Counter

from policy_world import World, local_machine, settings

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.policy.ledger import LedgerWriter, Stage


def ledger(*engines: int) -> LedgerWriter:
    """Two attempts on each engine, all of one prompt."""
    book = LedgerWriter()
    workers = tuple(map(EngineId, engines))
    book.take(ev.StepStarted(step=3, engines=workers, replicas=(), remaining={}))
    for attempt, worker in enumerate(sorted(workers * 2)):
        start = do.StartAttempt(
            attempt=AttemptId(attempt), prompt=PromptId("p"), index=attempt, engine=worker
        )
        book.follow(start)
    return book


def check(book: LedgerWriter) -> None:
    """Its counts are those of its attempts."""
    running = list(book.running.values())
    assert [one for one in book.attempts.values() if one.stage is Stage.RUNNING] == running
    assert Counter(book.loads) == Counter(one.engine for one in running)
    assert Counter(book.bound) == Counter(one.bound for one in running)
    assert book.busy == len(book.by_engine())


def move(book: LedgerWriter, source: int, target: int) -> None:
    attempts = book.by_engine()[EngineId(source)]
    book.follow(
        do.MigrateAttempts(attempts=attempts, source=EngineId(source), target=EngineId(target))
    )


def test_a_move_changes_where_attempts_are_bound_at_once_and_where_they_run_when_it_is_done():
    book = ledger(0, 1)
    move(book, 0, 1)
    check(book)
    assert book.loads == {0: 2, 1: 2}
    assert book.bound == {0: 0, 1: 4}
    assert not book.decodes(EngineId(0))
    arrived = ev.AttemptMigrated(attempt=AttemptId(0), engine=EngineId(1), tokens=5)
    assert book.take(arrived) is book.attempts[AttemptId(0)]
    check(book)
    assert book.loads == {0: 1, 1: 3}


def test_what_dies_with_its_engine_is_on_no_other():
    book = ledger(0, 1)
    move(book, 0, 1)
    book.take(ev.DevicesLost(engines=(EngineId(0),), replicas=()))
    check(book)
    assert [one.id for one in book.lost_with(EngineId(0))] == [0, 1]
    assert book.bound == {1: 2}


def test_what_is_on_its_way_to_an_engine_that_dies_is_where_it_was():
    book = ledger(0, 1)
    move(book, 0, 1)
    book.take(ev.DevicesLost(engines=(EngineId(1),), replicas=()))
    check(book)
    assert book.by_engine() == {EngineId(0): (0, 1)}


def test_an_event_counts_once():
    book = ledger(0)
    finished = ev.AttemptFinished(attempt=AttemptId(0), tokens=7, finish_reason="stop")
    graded = ev.AttemptGraded(attempt=AttemptId(0), reward=1.0)
    assert book.take(graded) is None
    assert book.take(finished) is not None
    assert book.take(finished) is None
    book.follow(do.GradeAttempt(attempt=AttemptId(0)))
    assert book.take(graded) is not None
    assert book.take(graded) is None
    book.follow(do.AbortAttempt(attempt=AttemptId(1)))
    stopped = ev.AttemptAborted(attempt=AttemptId(1), tokens=3)
    assert book.take(stopped) is not None
    assert book.take(stopped) is None
    check(book)
    assert (book.grading, book.stopping, book.idled) == (0, 0, [EngineId(0)])


def test_an_attempt_that_died_before_it_moved_does_not_keep_its_new_engine_from_training():
    freed = {"group_tokens": 200, "scaling": "fixed", "scaling_fraction": 0.25}
    rollout = {"prompts_per_step": 4, "num_generations": 2, "streaming": freed}
    world = World(settings(rollout, {"a": 4}, machine=local_machine(4)), workers=4)
    world.start()
    for attempt in (0, 1):
        world.finish(AttemptId(attempt), 100)
    assert world.moving == {6: 1, 7: 2}
    world.lose(EngineId(3))
    for attempt in sorted(a for a, engine in world.running.items() if engine == 1):
        world.finish(attempt, 1000)
    for attempt in sorted(world.grading):
        world.grade(attempt, float(attempt))
    assert set(world.running.values()) == {2}
    assert {worker for worker, _ in world.gradients} == {0, 1}
