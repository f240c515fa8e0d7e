"""Rewards, grading processes and sandboxes that fail while a job runs: nothing is lost."""

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest
from pool_helpers import grading_processes
from program_jobs import (
    IDLE,
    LOOP,
    RIGHT,
    SLOW,
    WRONG,
    run,
    seconds_old,
    times_trained,
    tree,
    write_model,
    write_rows,
)

from waiting import children

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")

ROWS = 12
BUSY = "sum(range(3_000_000))\n" + RIGHT

FLAKY = """
import os, pathlib, signal, time

def flaky(completions, prompts, marker, **_):
    once = pathlib.Path(marker + prompts[0])
    if prompts[0] not in ("001", "002", "003", "004") or once.exists():
        return [0.25]
    once.touch()
    if prompts[0] == "001":
        raise RuntimeError("the judge is ill")
    if prompts[0] == "002":
        time.sleep(1000)
    if prompts[0] == "003":
        return ["great"]
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("faults")
    write_model(made / "model", {RIGHT: 4, SLOW: 2, WRONG: 2})
    write_model(made / "slower", {BUSY: 6, WRONG: 2})
    write_rows(made / "rows.jsonl", ROWS)
    (made / "judges.py").write_text(FLAKY)
    return made


def table(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "samples" / "*.parquet")


def check_scores(folder: Path, added: float = 0.0) -> None:
    """No score was invented: each is that of its own tests."""
    rows = table(folder)
    assert set(rows["state"]) == {"kept"}
    for reward, verdict, tests in rows.select("reward", "code_verdict", "test_verdicts").rows():
        passed = tests == ["pass"] * 3
        assert passed == (verdict == "pass")
        assert reward == float(passed) + added


def test_each_fault_is_mended_and_named_once(folder: Path) -> None:
    options = {"marker": str(folder / "once-")}
    flaky = {"function": f"{folder}/judges.py:flaky", "timeout_s": 1.0, "options": options}
    path, said = run(tree(folder, "flaky", rewards=[{"function": "code"}, flaky]))
    assert times_trained(path) == Counter({f"p{i}": 1 for i in range(ROWS)})
    check_scores(path, added=0.25)
    # The live view may have looked at one meanwhile.
    faults = [line for line in said.splitlines() if line.startswith("step ") and "flaky" in line]
    for fault in ("the judge is ill", "timed out after 1 s", "str 'great'", "killed by signal 9"):
        assert sum(fault in line for line in faults) == 1, said
    assert len(faults) == 4
    assert all(line.endswith("it is called again") for line in faults)


def zygotes() -> list[int]:
    return [zygote for pid in grading_processes() for zygote in children(pid)]


@contextmanager
def killing(victims: Callable[[], list[int]]) -> Iterator[list[int]]:
    """kill -9 of one of them every second, once it had the time to start; which were killed."""
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(1.0):
            grown = [pid for pid in victims() if seconds_old(pid) > 4.0]
            for pid in grown[:1]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                killed.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("victims", [grading_processes, zygotes])
def test_kill_9_every_second_loses_no_prompt(
    folder: Path, victims: Callable[[], list[int]]
) -> None:
    name = victims.__name__
    grading = {"workers": 2, "retries": 8, "code_timeout": {"most_s": 10.0}}
    job = tree(folder, name, epochs=2, grading=grading, model__path=str(folder / "slower"))
    with killing(victims) as killed:
        path, said = run(job)
    assert len(killed) >= 3
    assert times_trained(path) == Counter({f"p{i}": 2 for i in range(ROWS)})
    check_scores(path)
    if victims is zygotes:
        assert "a sandbox fork server died and was replaced" in said or "it is called again" in said
    else:
        assert "signal 9" in said


@pytest.mark.slow
def test_programs_that_lose_a_race_are_stopped(tmp_path: Path) -> None:
    """Endless programs with timeouts beyond the test's own: a race that waited for one of them
    would not end."""
    write_model(tmp_path / "model", {RIGHT: 6, LOOP: 1, IDLE: 1})
    write_rows(tmp_path / "rows.jsonl", ROWS)
    job = tree(
        tmp_path,
        "race",
        grading={"workers": 8, "code_timeout": {"most_s": 600.0}},
        rollout__tail_batching={"mode": "race", "eta_prompts": 2.0, "eta_responses": 2.0},
        steps=1,
    )
    path, said = run(job)
    rows = table(path)
    assert (rows["state"] == "aborted").any()
    assert set(rows.filter(pl.col("state") == "kept")["code_verdict"]) <= {
        "pass",
        "no_code",
        "fail",
        "crash",
    }
    assert "reward 'code'" not in said
