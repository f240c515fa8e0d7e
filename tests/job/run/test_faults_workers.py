"""Workers and rewards that fail while a job runs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from runtime_jobs import Workshop, checkpoints, kept_groups, metrics, run, table, times_trained

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.messages.faults import WorkerError

ROWS = 11
HEALTHY = {f"p{i}" for i in range(ROWS)} - {"p3", "p4", "p5", "p6"}
shop = Workshop.fixture(rows=ROWS)


def assassin(
    shop: Workshop, victims: int, by: str = "SIGKILL", marker: Path | None = None
) -> list[dict[str, Any]]:
    """A reward that kills workers in the middle of a rollout, once."""
    marker = marker or shop.folder / f"killed-{victims}-{by}"
    options = {"marker": str(marker), "victims": victims, "by": by}
    return [{"function": f"{shop.rewards}:assassin", "options": options}]


def test_a_faulty_reward_harms_only_its_own_prompts(shop: Workshop) -> None:
    """It raises, hangs, returns nonsense or kills its process, for one prompt each."""
    config = shop.config(
        "faulty",
        epochs=1,
        devices__per_node=1,
        rewards=[{"function": f"{shop.rewards}:faulty", "timeout_s": 0.5}],
        grading={"workers": 2, "retries": 0},
        rollout__max_retries=0,
    )
    folder, said = run(config)
    assert times_trained(folder) == Counter(HEALTHY)
    assert set(kept_groups(folder).values()) == {3}
    assert set(table(folder, "failed")["prompt"]) == {"p3", "p4", "p5", "p6"}
    for part in ("the judge is ill", "timed out", "str 'great'", "signal 9"):
        assert part in said
    for prompt in ("p3", "p4", "p5", "p6"):
        assert f"reward of prompt {prompt}" in said
    assert json.loads((folder / "summary.json").read_text())["prompts_trained"] == len(HEALTHY)


def test_a_killed_worker_is_survived(shop: Workshop) -> None:
    changes = {"devices__per_node": 2, "epochs": 1}
    config = shop.config("survived", "race", rewards=assassin(shop, 1), **changes)
    folder, said = run(config)
    assert (shop.folder / "killed-1-SIGKILL").exists()
    assert times_trained(folder) == Counter({f"p{i}": 1 for i in range(ROWS)})
    assert set(kept_groups(folder).values()) == {3}
    lost = "lost: engine 1, replica 1"
    assert f"worker 1 died: exit code -9; {lost}" in said
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    last = metrics(folder)[-1]["step"]
    rows = table(folder)
    assert set(rows.filter(rows["step"] == last)["worker"]) == {0}


@pytest.mark.wide
def test_an_evaluation_goes_on_without_a_killed_worker(shop: Workshop) -> None:
    """What it ran is sampled elsewhere, the same to the bit."""
    changes: dict[str, Any] = {"devices__per_node": 2, "steps": 1}
    changes |= {"eval": {"data": {"path": str(shop.data)}, "num_generations": 3}}
    whole, _ = run(shop.config("measured", **changes))
    marker = shop.folder / "killed-while-measured"
    killed, said = run(
        shop.config("measured-less", rewards=assassin(shop, 1, marker=marker), **changes)
    )
    assert marker.exists()
    assert "evaluation: worker 1 died: exit code -9; lost: engine 1, replica 1" in said
    before, again = (json.loads((it / "summary.json").read_text()) for it in (whole, killed))
    assert again["before"] == before["before"]
    assert (before["workers"], again["workers"]) == (2, 1)
    assert again["steps"] == 1


@pytest.mark.slow
def test_a_frozen_worker_is_taken_for_dead(shop: Workshop) -> None:
    """It lives and its socket is open, but it gives no sign of life; the update may begin before
    that is noticed."""
    changes = {"devices__per_node": 2, "cluster__heartbeat_s": 1.0, "epochs": 1}
    changes |= {"cluster__restarts": 1}
    config = shop.config("frozen", rewards=assassin(shop, 1, "SIGSTOP"), **changes)
    folder, said = run(config)
    assert "worker 1 died: it gave no sign of life" in said
    assert times_trained(folder) == Counter({f"p{i}": 1 for i in range(ROWS)})
    assert set(kept_groups(folder).values()) == {3}


@pytest.mark.slow
def test_all_workers_killed_ends_the_run(shop: Workshop) -> None:
    changes = {"rewards": assassin(shop, 2), "checkpoint__every": 1, "devices__per_node": 2}
    config = shop.config("lost", **changes)
    with pytest.raises(WorkerError, match=r"worker [01] died: exit code -9") as caught:
        run(config)
    assert len(str(caught.value).splitlines()) == 1
    folder, _ = run(config, resume=True)
    assert times_trained(folder) == Counter({f"p{i}": 2 for i in range(ROWS)})
    assert checkpoints(folder)[-1] == 6
