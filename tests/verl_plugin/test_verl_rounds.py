"""Rounds inside verl: what is trained on, what is thrown away, and what is known of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import ray_here
from verl_jobs import P0, PROMPTS, R0, Ran, run, write_inputs

from rollpacker.core.journal import replay
from rollpacker.policy.rollout import from_journal

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_here.started():
        yield


EPOCHS, RACED = 2, 40
METERED = 96
LARGE = (
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=8",
    "trainer.total_epochs=1",
)


def jobs(base: Path, mode: str, count: int, *more: str) -> Ran:
    folder = base / mode
    folder.mkdir()
    write_inputs(folder, count)
    return run(folder, f"+rollpacker.tail_batching.mode={mode}", *more)


@pytest.fixture(scope="module")
def exact(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return jobs(tmp_path_factory.mktemp("verl"), "exact", PROMPTS)


@pytest.fixture(scope="module")
def race(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """As many steps as the bias meter pools."""
    return jobs(tmp_path_factory.mktemp("verl"), "race", RACED)


@pytest.fixture(scope="module")
def prompts(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return jobs(tmp_path_factory.mktemp("verl"), "prompts", PROMPTS)


@pytest.fixture(scope="module")
def large(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Batches that tell a few percent; all steps are in what the bias meter pools."""
    return jobs(tmp_path_factory.mktemp("large"), "race", METERED, *LARGE)


@pytest.fixture(scope="module")
def audit(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same, and nothing of it is aborted: all prompts of all rounds are audited."""
    every = [f"+rollpacker.tail_batching.audit_{key}" for key in ("every=1", "prompts=1000")]
    return jobs(tmp_path_factory.mktemp("audit"), "race", METERED, *LARGE, *every)


@pytest.fixture(params=["exact", "race", "prompts"])
def ran(request: pytest.FixtureRequest) -> Ran:
    return request.getfixturevalue(request.param)


def epochs(steps: Sequence[Sequence[str]], count: int) -> list[Counter[str]]:
    """How often each epoch has trained on each prompt's responses."""
    each = count // P0
    cut = [steps[at : at + each] for at in range(0, len(steps), each)]
    return [Counter(uid for step in part for uid in step) for part in cut]


def test_every_prompt_is_trained_on_once_an_epoch(exact: Ran, race: Ran, prompts: Ran) -> None:
    for ran, count in ((exact, PROMPTS), (race, RACED), (prompts, PROMPTS)):
        found = epochs(ran.steps, count)
        assert len(found) == EPOCHS
        assert len(found[0]) == count
        for epoch in found:
            assert set(epoch) == set(found[0])
            assert set(epoch.values()) == {R0}


def test_a_step_trains_on_whole_groups(ran: Ran) -> None:
    for step in ran.steps:
        assert Counter(Counter(step).values()) == {R0: P0}


def test_no_request_is_alive_when_weights_change(ran: Ran) -> None:
    assert ran.alive == 0
    assert ran.inflight == 0
    assert not [request for request in ran.requests if request.outcome == "alive"]


def test_responses_are_of_the_weights_that_they_train(ran: Ran) -> None:
    for metrics in ran.metrics:
        assert metrics["training/off_policy/trajectory_staleness/max"] == 0
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0


def test_nothing_is_left_in_the_transfer_queue(ran: Ran) -> None:
    assert set(ran.left) == {0}


def test_exact_throws_nothing_away(exact: Ran) -> None:
    assert len(exact.requests) == EPOCHS * PROMPTS * R0
    assert {request.outcome for request in exact.requests} == {"finished"}
    assert {metrics["tail/kept_vs_true_len"] for metrics in exact.metrics} == {1.0}


def test_race_aborts_on_the_servers(race: Ran) -> None:
    aborted = [request for request in race.requests if request.outcome == "aborted"]
    finished = [request for request in race.requests if request.outcome == "finished"]
    assert len(aborted) > len(race.requests) / 20
    # What loses a race is long.
    assert np.mean([r.length for r in aborted]) > 1.5 * np.mean([r.length for r in finished])
    kinds = [metrics["tail/round_kind"] for metrics in race.metrics]
    assert kinds[:5] == [1.0, 1.0, 1.0, 1.0, 2.0]
    assert sum(m["tail/aborted_tokens_estimated"] for m in race.metrics) > 0


def test_the_bias_meter_is_near_what_no_abort_would_have_shown(large: Ran, audit: Ran) -> None:
    """The stub servers know how long aborted responses would have been, and a run whose prompts are
    all audited shows it: the meter, which sees only how long aborted ones ran, is within 5%."""
    kept = np.mean([metrics["response_length/mean"] for metrics in large.metrics])
    true = np.mean([request.length for request in large.requests])
    metered = large.metrics[-1]["tail/kept_vs_true_len"]
    assert {request.outcome for request in audit.requests} == {"finished"}
    audited = audit.metrics[-1]["tail/audited_kept_vs_true_len"]
    assert metered < 0.9, "nothing to meter"
    assert metered == pytest.approx(kept / true, rel=0.05)
    assert metered == pytest.approx(audited, rel=0.05)


def test_the_journal_replays(ran: Ran) -> None:
    again = replay(ran.journal, from_journal)
    assert again.differences == []
    assert again.events > 0
    assert again.unfinished is None


@pytest.mark.parametrize(("mode", "stop"), [("exact", 6), ("race", 6)])
def test_a_resumed_run_trains_on_what_is_left(
    cluster: None, tmp_path: Path, mode: str, stop: int
) -> None:
    """In the second epoch; in a race, with prompts in the queue that this epoch has drawn."""
    write_inputs(tmp_path)
    options = (f"+rollpacker.tail_batching.mode={mode}", "trainer.save_freq=3")
    first = run(tmp_path, *options, f"trainer.total_training_steps={stop}")
    queued = first.metrics[-1]["tail/long_queue"]
    assert queued == (2.0 if mode == "race" else 0.0)
    second = run(tmp_path, *options)
    assert len(first.steps) == stop
    found = epochs([*first.steps, *second.steps], PROMPTS)
    assert len(found) == EPOCHS
    for epoch in found:
        assert len(epoch) == PROMPTS
        assert set(epoch.values()) == {R0}
    again = replay(second.journal, from_journal)
    assert again.differences == []
    assert again.unfinished is None
