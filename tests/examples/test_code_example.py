import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from importing import imported
from rollpacker.config import load
from rollpacker.data.load import load_rows
from rollpacker.job import train
from rollpacker.reward.code.blocks import find_program
from rollpacker.sandbox import Limits, Sandbox, read_tests

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "code"
RIGHT = {"short": False, "inverted": False, "backwards": False}


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with imported(EXAMPLE, "problems", "corpus", "prepare") as modules:
        yield modules


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(ROOT)
    return load(EXAMPLE / "train.yaml")


def test_training_and_evaluation_share_no_problem(config: Any) -> None:
    trained = load_rows(config.data).rows
    heldout = load_rows(config.eval.data).rows
    assert len({row.prompt for row in trained}) == len(trained) == 640
    assert len({row.prompt for row in heldout}) == len(heldout) == 256
    assert not {row.prompt for row in trained} & {row.prompt for row in heldout}


@pytest.mark.parametrize(
    ("loop", "mistake", "verdict"),
    [
        (False, None, "pass"),
        (True, None, "pass"),
        (False, "short", "fail"),
        (True, "short", "fail"),
        (False, "inverted", "fail"),
        (True, "inverted", "fail"),
        (True, "backwards", "tle_cpu"),
    ],
)
def test_programs(example: Any, loop: bool, mistake: str | None, verdict: str) -> None:
    mistakes = RIGHT | ({mistake: True} if mistake else {})
    # Loops that do not end are worth no long wait.
    limit_s = 0.02 if verdict == "tle_cpu" else 0.1
    found: list[str] = []
    with Sandbox("standard", check=False, limits=Limits(memory_mb=256)) as sandbox:
        for problem in example.problems.train_problems(24, 5):
            if mistake == "inverted" and not problem.divisor:
                continue
            response = example.corpus.program(problem, loop=loop, **mistakes)
            tests = read_tests({"tests": problem.tests()})
            program = find_program(response)
            assert program is not None
            found.append(sandbox.run(program.code, tests, limit_s, stop_early=True).verdict)
    assert found == [verdict] * len(found)


def test_every_text_is_spelled_by_the_tokenizer(example: Any) -> None:
    tokenizer = example.prepare.build_tokenizer()
    rng = random.Random(0)
    for problem in example.problems.train_problems(300, 0):
        for text in (
            problem.question(),
            example.corpus.sample(problem, rng, example.corpus.Habits()),
        ):
            ids = tokenizer(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert len(ids) < 48


@pytest.mark.slow
def test_the_run(config: Any, tmp_path: Path) -> None:
    command = "from prepare import *; prepare(Path(sys.argv[1]), steps=2)"
    folder = tmp_path / "model"
    subprocess.run([sys.executable, "-c", command, str(folder)], cwd=EXAMPLE, check=True)
    changes = {
        "model": config.model.model_copy(update={"path": str(folder)}),
        "output": str(tmp_path / "run"),
        "steps": 1,
        "eval": None,
        "devices": config.devices.model_copy(update={"per_node": 1, "pin": False}),
        "grading": config.grading.model_copy(update={"workers": 1}),
        "rollout": config.rollout.model_copy(update={"prompts_per_step": 2, "num_generations": 2}),
    }
    train(config.model_copy(update=changes))
    samples = pl.read_parquet(tmp_path / "run" / "samples" / "*.parquet")
    assert samples.height == 4
    assert samples["code_verdict"].null_count() == 0
