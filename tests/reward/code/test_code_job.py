"""Whole jobs with programs as rewards: what is recorded, restored, refused and routed."""

import json
import struct
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from program_jobs import (
    CRASH,
    LOOP,
    MOST_S,
    RIGHT,
    SLOW,
    WRONG,
    metrics,
    run,
    times_trained,
    tree,
    write_model,
    write_rows,
)

from case_files import read_table
from rollpacker.config import RewardConfig
from rollpacker.core import journal
from rollpacker.core.types import PromptId
from rollpacker.data.base import Row
from rollpacker.policy.rollout import from_journal
from rollpacker.processes import fork_server
from rollpacker.runtime.attempts.rewards import check_rows
from rollpacker.sandbox.guest.lockdown import kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the code sandbox needs Linux")

ROWS = 8
HALF = {f"p{i}" for i in range(0, ROWS, 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("programs")
    write_model(made / "model", {RIGHT: 4, SLOW: 2, WRONG: 2, CRASH: 1, LOOP: 1})
    write_rows(made / "rows.jsonl", ROWS)
    lines = (made / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"tag": ("code", "text")[i % 2]} for i, line in enumerate(lines)]
    for row in rows[1::2]:
        del row["tests"]
    (made / "mixed.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (made / "length.py").write_text(
        "def length(completions, **_):\n    return [len(c) / 1000 for c in completions]\n"
    )
    return made


@pytest.fixture(scope="module")
def mixed(folder: Path) -> tuple[Path, str]:
    """Half of the rows are of domain ``code``; two epochs of two steps, the second one resumed.
    Deterministic: timeouts change between steps only."""
    rewards = [
        {"function": "code", "domains": ["code"]},
        {"function": f"{folder}/length.py:length", "domains": ["text"]},
    ]
    changes = {"data__path": str(folder / "mixed.jsonl"), "data__domain_key": "tag"}
    job = tree(folder, "mixed", epochs=2, steps=2, rewards=rewards, deterministic=True, **changes)
    path, said = run(job)
    del job["steps"]
    return path, said + run(job, resume=True)[1]


def table(folder: Path) -> pl.DataFrame:
    return pl.read_parquet(folder / "samples" / "*.parquet")


def test_every_prompt_is_trained_once_an_epoch(mixed: tuple[Path, str]) -> None:
    assert times_trained(mixed[0]) == Counter({f"p{i}": 2 for i in range(ROWS)})
    assert "WARNING reward" not in mixed[1]
    assert journal.replay(mixed[0] / "journal.jsonl", from_journal).differences == []


def test_domains_are_graded_by_their_own_reward(mixed: tuple[Path, str]) -> None:
    rows = table(mixed[0])
    assert set(rows.filter(pl.col("code_verdict").is_not_null())["prompt"]) == HALF
    text = rows.filter(pl.col("code_verdict").is_null())
    assert set(text["prompt"]) == {f"p{i}" for i in range(ROWS)} - HALF
    assert set(text["state"]) == {"kept"}


def test_samples_hold_each_test(mixed: tuple[Path, str]) -> None:
    rows = table(mixed[0]).drop_nulls("code_verdict")
    assert set(rows["sandbox_level"]) == {"standard"}
    assert not rows["forgeable"].any()
    for row in rows.iter_rows(named=True):
        tests, seconds = row["test_verdicts"], row["test_cpu_s"]
        assert len(tests) == len(seconds)
        passed = tests == ["pass"] * 3
        assert row["reward"] == float(passed) == float(row["code_verdict"] == "pass")
        if not passed and tests:
            assert row["code_verdict"] == tests[-1] != "pass"
    assert {"pass", "fail"} <= set(rows["code_verdict"])


def test_metrics_are_those_of_the_table(mixed: tuple[Path, str]) -> None:
    rows = table(mixed[0]).drop_nulls("code_verdict")
    for line in metrics(mixed[0]):
        mine = rows.filter(pl.col("step") == line["step"])
        verdicts = mine["code_verdict"].to_list()
        assert line["rewards/code/passed"] == verdicts.count("pass") / len(verdicts)
        assert line["rewards/code/timeouts"] == verdicts.count("tle_cpu") / len(verdicts)
        assert line["rewards/code/no_code"] == verdicts.count("no_code") / len(verdicts)
        seconds = mine["test_cpu_s"].explode().sum()
        assert line["rewards/code/cpu_s"] == pytest.approx(seconds, abs=1e-3)
        assert line["rewards/code/mean"] == line["rewards/code/passed"]
        assert "rewards/length/passed" not in line


def saved_timeouts(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / f"checkpoint-{step}" / "state.json").read_text())["rewards"]


def test_timeouts_follow_the_tests_and_are_saved(mixed: tuple[Path, str]) -> None:
    given = [line["rewards/code/timeout_s"] for line in metrics(mixed[0])]
    assert given[0] > given[-1]
    assert given[-1] < MOST_S
    state = saved_timeouts(mixed[0], 4)
    anchors = dict(state["anchors"])
    assert {case.partition("#")[0] for case in anchors} <= HALF
    passed = table(mixed[0]).filter(pl.col("code_verdict") == "pass")
    for prompt in set(passed["prompt"]):
        times = passed.filter(pl.col("prompt") == prompt)["test_cpu_s"].to_list()
        for test in range(3):
            longest = max(each[test] for each in times)
            assert anchors[f"{prompt}#{test}"] == pytest.approx(longest, abs=1e-5)


def test_the_report_lists_tests(mixed: tuple[Path, str]) -> None:
    page = (mixed[0] / "report.html").read_text(encoding="utf-8")
    assert "Programs and their tests" in page
    assert "at sandbox level standard" in page


def test_between_steps_only_and_across_a_resume(mixed: tuple[Path, str]) -> None:
    """The first epoch has the longest timeouts; a resumed run knows what was seen."""
    before = saved_timeouts(mixed[0], 2)
    assert before["anchors"]
    assert before["later"] == {}
    given = [line["rewards/code/timeout_s"] for line in metrics(mixed[0])]
    assert given[:2] == [MOST_S, MOST_S]
    assert given[2] < MOST_S


def deny_landlock() -> None:
    """To this thread and the processes that it starts, as a kernel without it does."""
    program = ((0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000))
    kernel.no_new_privileges()
    kernel.SeccompFilter(b"".join(struct.pack("=HBBI", *each) for each in program)).install()


def without_landlock(job: dict[str, Any]) -> tuple[Path, str]:
    """A run whose grading processes have no Landlock: the thread that starts what they are forked
    off has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "_servers", {})
        with ThreadPoolExecutor(1, initializer=deny_landlock) as thread:
            return thread.submit(run, job).result()


def test_a_weaker_sandbox_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"^rewards: ") as caught:
        without_landlock(tree(folder, "refused"))
    said = str(caught.value)
    assert said.startswith("rewards: 'code': sandbox level 'standard' does not work")
    assert said.endswith("choose a weaker level (options.level, options.allow_weaker)")
    assert "\n" not in said
    assert not (folder / "refused" / "metrics.jsonl").exists()


@pytest.mark.wide
def test_a_weaker_sandbox_that_was_asked_for_is_said_and_stamped(folder: Path) -> None:
    rewards = [{"function": "code", "options": {"allow_weaker": True}}]
    path, said = without_landlock(tree(folder, "weaker", rewards=rewards, steps=1))
    warnings = [line for line in said.splitlines() if "sandbox level" in line]
    assert warnings == [
        "WARNING reward 'code': programs run at sandbox level 'basic', weaker than 'standard' "
        "(options.allow_weaker) (2 times)"
    ]
    assert set(table(path)["sandbox_level"]) == {"basic"}


def row(name: str, domain: str, **columns: Any) -> Row:
    return Row(id=PromptId(name), prompt="p", answer=None, domain=domain, columns=columns)


TESTED = {"tests": [{"stdin": "", "stdout": ""}]}


@pytest.mark.parametrize(
    ("rewards", "message"), read_table(__file__, "test_rows_and_rewards_must_fit")
)
def test_rows_and_rewards_must_fit(rewards: list[dict[str, Any]], message: str) -> None:
    rows = [row("y", "b", question=1), row("x", "a", **TESTED)]
    with pytest.raises(ValueError, match=r"^rewards") as caught:
        check_rows([RewardConfig.model_validate(each) for each in rewards], rows)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    fitting = [{"function": "code", "domains": ["a"]}, {"function": "rg", "domains": ["b"]}]
    check_rows([RewardConfig.model_validate(each) for each in fitting], rows)


def test_a_tolerance_that_is_none_is_seen_before_the_run() -> None:
    rows = [row("y", "a", **TESTED, float_tolerance="small")]
    message = (
        "rewards.0: 'code' cannot read the tests of row 'y': float_tolerance: expected a finite "
        "number above 0, got 'small'. Choose its rows with rewards[].domains."
    )
    with pytest.raises(ValueError, match=r"^rewards") as caught:
        check_rows([RewardConfig(function="code")], rows)
    assert str(caught.value) == message
