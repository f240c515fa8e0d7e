"""One of two workers is killed at a random moment: between steps, decoding, updating, saving."""

import json
import multiprocessing
import random
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from runtime_jobs import Workshop, kept_groups, run, times_trained

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.messages.faults import WorkerError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROWS = 11
EPOCHS = 30


def kill_later(folder: Path, victim: str, seconds: float) -> threading.Thread:
    def act() -> None:
        while not (folder / "metrics.jsonl").exists():
            time.sleep(0.01)
        time.sleep(seconds)
        for process in multiprocessing.active_children():
            if process.name == victim:
                process.kill()

    thread = threading.Thread(target=act)
    thread.start()
    return thread


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("mode", ["race", "exact"])
def test_a_worker_killed_at_any_moment(tmp_path: Path, mode: str, seed: int) -> None:
    """The run goes on, or, where a change of weights was cut in two, ends in a clear way."""
    rng = random.Random(seed)
    shop = Workshop(tmp_path, rows=ROWS)
    config = shop.config("job", mode, epochs=EPOCHS, devices__per_node=2, checkpoint={"every": 1})
    folder = tmp_path / "job"
    victim = rng.choice(["worker-0", "worker-1"])
    thread = kill_later(folder, victim, rng.uniform(0, 3))
    ended: list[str] = []
    try:
        _, said = run(config)
        assert f"{victim.replace('-', ' ')} died: exit code -9" in said
    except WorkerError as error:
        ended = str(error).splitlines()
        run(config, resume=True)
    finally:
        thread.join()
    print("ended:", ended)
    assert len(ended) <= 1
    assert set(kept_groups(folder).values()) == {3}
    assert times_trained(folder) == Counter({f"p{i}": EPOCHS for i in range(ROWS)})
    assert json.loads((folder / "summary.json").read_text())["prompts_trained"] == ROWS * EPOCHS
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
