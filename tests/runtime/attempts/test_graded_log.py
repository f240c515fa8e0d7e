"""What a killed step had graded is used again, and only with the same weights."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runtime_jobs import (
    Workshop,
    checkpoints,
    kept_samples,
    largest_difference,
    run,
    start_cli,
    weights_digest,
)

from rollpacker.config import RunConfig
from rollpacker.core import journal
from rollpacker.core.types import AttemptId, EngineId, PromptId
from rollpacker.engine.base import Output
from rollpacker.job.run.checkpoint_manager import CheckpointManager
from rollpacker.policy.rollout import from_journal
from rollpacker.reward.base import CodeRun
from rollpacker.runtime.attempts.attempts import Trajectory
from rollpacker.runtime.attempts.graded_log import GradedLog
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.step import StepRecord

STEP = 3
RUN = CodeRun(
    verdict="fail",
    tests=("pass", "fail"),
    cpu_s=(0.01, 0.02),
    timeout_s=2.0,
    level="standard",
    forgeable=False,
)


def graded(number: int) -> Trajectory:
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 99, number + 1).astype(np.int32)
    attempt = AttemptId(number)
    return Trajectory(
        id=attempt,
        prompt=PromptId(f"p{number // 2}"),
        index=number % 2,
        engine=EngineId(0),
        prompt_tokens=np.zeros(2, np.int32),
        start_s=0.0,
        since_s=0.0,
        output=Output(
            attempt=attempt,
            tokens=tokens,
            logprobs=-rng.random(number + 1).astype(np.float32),
            finish_reason="stop",
            weights_version=STEP,
        ),
        graded_s=1.0,
        reward=number / 3,
        rewards={"ones": number / 3, "never": None},
        runs={"code": RUN} if number % 2 else {},
        extra={"found": "3"} if number % 2 else {},
        metrics={"correct": 0.5},
        carried=((1, 1), (2, number - 1)) if number > 1 else (),
    )


def written(path: Path, count: int) -> GradedLog:
    log = GradedLog(path, say=pytest.fail)
    assert log.begin(STEP, "w") == 0
    log.add(graded(number) for number in range(count))
    log.close()
    return log


def test_of_a_dropped_step_all_grades_are_kept(tmp_path: Path) -> None:
    """Also those that no reward applies to; not those of rewards that failed."""
    attempts = [graded(number) for number in range(4)]
    attempts[0].reward = None
    attempts[3].graded_s = None
    attempts[1].verdict = "failed"
    log = GradedLog(tmp_path / "log", say=pytest.fail)
    parts = SimpleNamespace(log=SimpleNamespace(graded=log, progress=Progress()))
    checkpoints = SimpleNamespace(fingerprint=lambda _step: "w")
    config = RunConfig.model_validate(
        {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}
    )
    record = StepRecord(step=STEP, start_s=0.0, attempts={a.id: a for a in attempts})
    keeper: Any = CheckpointManager
    keeper(config, parts, checkpoints).keep_graded(record)
    log.close()
    assert log.begin(STEP, "w") == 2
    known = log.find(PromptId("p0"), 0)
    assert known is not None
    assert known.grade.reward is None


def test_what_was_graded_comes_back_to_the_bit_under_its_new_id(tmp_path: Path) -> None:
    written(tmp_path / "log", 5)
    log = GradedLog(tmp_path / "log", say=pytest.fail)
    assert log.begin(STEP, "w") == 5
    for number in range(5):
        known, old = log.find(PromptId(f"p{number // 2}"), number % 2), graded(number)
        assert known is not None
        assert old.output is not None
        output, grade = known.output_of(AttemptId(70), STEP), known.grade_of(AttemptId(70))
        assert grade is not None
        assert (output.attempt, grade.attempt) == (70, 70)
        np.testing.assert_array_equal(output.tokens, old.output.tokens)
        np.testing.assert_array_equal(output.logprobs, old.output.logprobs)
        assert (grade.reward, grade.rewards, grade.runs) == (old.reward, old.rewards, old.runs)
        assert (grade.extra, grade.metrics) == (old.extra, old.metrics)
        assert (output.finish_reason, output.weights_version) == ("stop", STEP)
        assert known.carried == old.carried
    assert log.find(PromptId("p9"), 0) is None


@pytest.mark.parametrize(("step", "weights"), [(STEP + 1, "w"), (STEP, "other"), (STEP, None)])
def test_another_step_or_other_weights_begin_anew(
    tmp_path: Path, step: int, weights: str | None
) -> None:
    path = tmp_path / "log"
    written(path, 5)
    log = GradedLog(path, say=pytest.fail)
    assert log.begin(step, weights) == 0
    assert path.exists() == (weights is not None)
    log.add([graded(0)])
    log.close()
    assert GradedLog(path, say=pytest.fail).begin(STEP, "w") == 0


def test_torn_anywhere_the_records_before_are_used_and_more_can_follow(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, 2)
    data = path.read_bytes()
    found: list[int] = []
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        log = GradedLog(path, say=pytest.fail)
        found.append(log.begin(STEP, "w"))
        log.add([graded(7)])
        log.close()
        assert GradedLog(path, say=pytest.fail).begin(STEP, "w") == found[-1] + 1
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 2)


def test_zeros_after_a_power_loss_are_no_record(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, 3)
    path.write_bytes(path.read_bytes() + bytes(4096))
    log = GradedLog(path, say=pytest.fail)
    assert log.begin(STEP, "w") == 3
    log.add([graded(7)])
    log.close()
    assert GradedLog(path, say=pytest.fail).begin(STEP, "w") == 4


def test_a_flipped_bit_ends_what_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, 2)
    data = path.read_bytes()
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 4
        path.write_bytes(flipped)
        log = GradedLog(path, say=pytest.fail)
        assert log.begin(STEP, "w") < 2
        log.close()


def test_a_full_disk_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    log = GradedLog(tmp_path / "log", say=said.append)
    log.begin(STEP, "w")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rollpacker.runtime.attempts.graded_log.AppendFile.write", full)
    log.add([graded(0)])
    log.add([graded(1)])
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_without_it_a_run_goes_on(tmp_path: Path) -> None:
    """It can be neither read, nor written, nor removed."""
    (tmp_path / "log").mkdir()
    said: list[str] = []
    log = GradedLog(tmp_path / "log", say=said.append)
    assert log.begin(STEP, "w") == 0
    log.add([graded(0)])
    assert log.begin(STEP + 1, None) == 0
    log.clear()
    log.clear()
    (line,) = said
    assert "cannot be written ([Errno 21] Is a directory" in line
    assert "the run goes on without it" in line


FIXED = {
    "deterministic": True,
    "epochs": 1,
    "checkpoint": {"every": 1, "keep": 9},
    "data__shuffle": False,
    "grading": {"workers": 1},
}
BREAKERS = """
import shutil

def calls(log, prompts, completion_ids):
    with open(log, "a") as file:
        file.write(json.dumps([prompts[0], completion_ids[0]]) + "\\n")
    return len(open(log).readlines())

def copier(completions, completion_ids, prompts, log, at, run, copy):
    if calls(log, prompts, completion_ids) == at:
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".lock"))
    return ones(completions)

def killer(completions, completion_ids, prompts, log, at):
    if calls(log, prompts, completion_ids) == at:
        os.kill(driver(), signal.SIGKILL)
        time.sleep(1000)
    return ones(completions)
"""
CALL = 12 + 9
"""Of the second step. In lockstep, what was graded before is in the log before the responses that
follow it end."""


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path, rows=8)
    shop.rewards.write_text(shop.rewards.read_text() + BREAKERS)
    return shop


def breaker(shop: Workshop, name: str, **options: str) -> dict[str, Any]:
    """A reward that does something at its call number ``CALL``."""
    options = {"log": str(shop.folder / "calls"), **options}
    return {"function": f"{shop.rewards}:{name}", "options": {"at": CALL, **options}}


def assert_uses_grades_again(shop: Workshop, cut: RunConfig, whole: Path) -> None:
    """Resumed, it samples only what was not graded, and ends as the undisturbed run."""
    folder = Path(cut.output)
    assert checkpoints(folder) == [1]
    before = calls(shop)
    _, said = run(cut, resume=True)
    reused = next(line for line in said.splitlines() if "used again" in line)
    count = int(reused.split("step 1: ")[1].split()[0])
    assert 1 <= count <= 9
    assert calls(shop) - before == 12 - count
    assert kept_samples(folder) == kept_samples(whole)
    one, other = (f / "checkpoint-2" for f in (folder, whole))
    if cut.devices.per_node == 1:
        assert weights_digest(one) == weights_digest(other)
    else:
        assert largest_difference(one, other) <= 1e-5
    assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
    assert not (folder / "graded.log").exists()


def calls(shop: Workshop) -> int:
    return (shop.folder / "calls").read_bytes().count(b"\n")


def test_a_broken_off_step_samples_only_what_was_not_graded(shop: Workshop) -> None:
    """What a kill leaves behind is what the files hold at that moment."""
    places = {"run": str(shop.folder / "whole"), "copy": str(shop.folder / "cut")}
    settings = {**FIXED, "rewards": [breaker(shop, "copier", **places)]}
    whole, _ = run(shop.config("whole", "exact", **settings))
    assert_uses_grades_again(shop, shop.config("cut", "exact", **settings), whole)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_step_samples_only_what_was_not_graded(shop: Workshop, workers: int) -> None:
    settings = {**FIXED, "devices__per_node": workers}
    whole, _ = run(shop.config("whole", "exact", **settings))
    settings["rewards"] = [breaker(shop, "killer")]
    process = start_cli("train", shop.file("cut", "exact", **settings))
    process.wait(120)
    assert process.returncode == -9
    process.communicate()
    assert_uses_grades_again(shop, shop.config("cut", "exact", **settings), whole)
