"""kill -9 of driver and workers at random moments, again and again, until the run is done."""

import random
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_groups,
    kept_samples,
    kill_group,
    run,
    start_cli,
    times_trained,
    weights_digest,
)

from rollpacker.core import journal
from rollpacker.policy.rollout import from_journal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROWS = 11
EPOCHS = 40
KILLS = 50
ONE_WORKER = {"deterministic": True, "devices__per_node": 1}


def lines(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run_until(process: subprocess.Popen[str], folder: Path, rng: random.Random) -> None:
    """Let it run for a random time: half of the times into training, else from the start."""
    before = lines(folder)
    if rng.random() < 0.7:
        while process.poll() is None and lines(folder) == before:
            time.sleep(0.01)
        wait = rng.expovariate(1 / 0.5)
    else:
        wait = rng.uniform(0, 8)
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        return


def killed_to_its_end(file: Path, folder: Path, kills: int, seed: int) -> int:
    """Start, kill and resume; returns how often it was killed."""
    rng = random.Random(seed)
    done = 0
    while True:
        process = start_cli("train", file, "--resume", "auto")
        if done < kills:
            run_until(process, folder, rng)
            if process.poll() is None:
                kill_group(process)
                done += 1
                continue
        _, said = process.communicate(timeout=900)
        assert process.returncode == 0, said
        return done


def assert_replays(folder: Path) -> None:
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []


def kill_one_worker(tmp_path: Path, mode: str, kills: int, epochs: int) -> int:
    shop = Workshop(tmp_path, rows=ROWS)
    changes = {"epochs": epochs, "checkpoint": {"every": 1}, **ONE_WORKER}
    whole, _ = run(shop.config("whole", mode, **changes))
    folder = tmp_path / "killed"
    killed = killed_to_its_end(shop.file("killed", mode, **changes), folder, kills, seed=7)
    assert kept_samples(folder) == kept_samples(whole)
    last = f"checkpoint-{checkpoints(whole)[-1]}"
    assert weights_digest(folder / last) == weights_digest(whole / last)
    assert_replays(folder)
    return killed


@pytest.mark.parametrize("mode", ["off", "race"])
def test_fifty_kills_change_nothing(tmp_path: Path, mode: str) -> None:
    killed = kill_one_worker(tmp_path, mode, KILLS, EPOCHS)
    print(f"{mode}: killed {killed} times")
    assert killed > KILLS // 2


def kill_two_workers(tmp_path: Path, mode: str, kills: int, epochs: int) -> int:
    shop = Workshop(tmp_path, rows=ROWS)
    file = shop.file("killed", mode, epochs=epochs, checkpoint={"every": 1})
    folder = tmp_path / "killed"
    killed = killed_to_its_end(file, folder, kills, seed=8)
    assert set(kept_groups(folder).values()) == {3}
    assert times_trained(folder) == Counter({f"p{i}": epochs for i in range(ROWS)})
    assert_replays(folder)
    return killed


@pytest.mark.parametrize("mode", ["off", "race", "exact"])
def test_kills_with_two_workers(tmp_path: Path, mode: str) -> None:
    killed = kill_two_workers(tmp_path, mode, KILLS // 5, EPOCHS // 4)
    print(f"{mode}: killed {killed} times")
    assert killed > 0
