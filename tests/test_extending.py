"""Follows docs/extending.md word by word, in a copy of the code, and shows that each part works."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from rollpacker import config
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import Grade, GradeRequest
from rollpacker.reward.processes.pool import GradingPool

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
COPIED = ("src/rollpacker", "docs", "tests/engine", "tests/train")
STEP = re.compile(r"^    ```(\w+) title=\"([^\"]+)\"\n(.*?)^    ```$", re.M | re.S)
SMALLEST = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}


def section(title: str) -> str:
    """What the page says under a heading."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def block(language: str, text: str) -> str:
    """The first block of a language that is no step of a list."""
    found = re.search(rf"^```{language}\b[^\n]*\n(.*?)^```$", text, re.M | re.S)
    assert found is not None
    return found[1]


def follow(page: str, root: Path) -> list[str]:
    """Write the page's files and make its changes; the paths."""
    paths: list[str] = []
    for language, path, body in STEP.findall(page):
        text = textwrap.dedent(body) if language == "python" else _unindented(body)
        file = root / path
        if language == "diff":
            lines = text.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            code = file.read_text(encoding="utf-8")
            assert code.count(old) == 1, f"{path}: the page is out of date:\n{old}"
            text = code.replace(old, new)
        file.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths


def _unindented(body: str) -> str:
    lines = [line[4:] if line.strip() else " \n" for line in body.splitlines(keepends=True)]
    return "".join(lines)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code after all that the page says has been done."""
    root = tmp_path_factory.mktemp("tree")
    for folder in COPIED:
        shutil.copytree(ROOT / folder, root / folder)
    shutil.copy(ROOT / "pyproject.toml", root)
    follow(PAGE, root)
    return root


def run(tree: Path, *args: str) -> str:
    """What Python says in the changed tree."""
    done = subprocess.run(
        [sys.executable, *args],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


OPTIONS = ("-p", "no:cacheprovider", "-p", "no:warnings", "-k")
FOLLOWED = """
import numpy as np
import torch
from rollpacker import config
from rollpacker.engine.configured import build_engine
from rollpacker.train.algorithms import Responses, build

SMALLEST = {SMALLEST}


def test_followed_an_algorithm_makes_a_gradient_step():
    run = config.parse(SMALLEST | {{"train": {{"algorithm": {{"kind": "median"}}}}}})
    algorithm = build(run.train.algorithm)
    lengths = np.ones(3, np.int64)
    advantages = algorithm.reward(np.array([0.0, 1.0, 5.0]), lengths, 1).advantages
    assert advantages.tolist() == [-1.0, 0.0, 4.0]

    policy = torch.zeros(3, requires_grad=True)  # over three responses of one token
    optimizer = torch.optim.SGD([policy], lr=0.1)
    logprobs = policy.log_softmax(0)
    responses = Responses(
        logprobs=logprobs,
        old=logprobs.detach(),
        advantages=torch.from_numpy(advantages),
        lengths=torch.from_numpy(lengths),
        owner=torch.arange(3),
    )
    losses, clipped = algorithm.surrogate(responses)
    weights = algorithm.weights(responses.lengths)[responses.owner]
    ((losses * weights).sum() / algorithm.normaliser(3, 3, 1)).backward()
    optimizer.step()
    worst, middle, best = (policy.softmax(0) - 1 / 3).tolist()
    assert worst < middle < 0 < best


def test_followed_an_engine_says_what_it_can_do():
    run = config.parse(SMALLEST | {{"engine": {{"kind": "uniform", "max_running": 2}}}})
    info = build_engine(run, None, None).info()
    assert (info.exact_seeds, info.tensor_parallel, sorted(info.latency)) == (True, (1,), [1, 64])
"""

IN_ONE = """
import gc
gc.disable()  # a fifth of the imports
import runpy
import sys
import pytest

sys.argv = ["gen.py", "config"]
runpy.run_path("docs/gen.py", run_name="__main__")
sys.exit(pytest.main({TESTS}))
"""
TESTS = ("tests/engine/test_engine_contract.py", "tests/engine/test_followed.py")


@pytest.fixture(scope="module")
def said(tree: Path) -> str:
    """What the reference, an algorithm and an engine say in one process, which imports what they
    need once."""
    followed = FOLLOWED.format(SMALLEST=SMALLEST)
    (tree / "tests" / "engine" / "test_followed.py").write_text(followed, encoding="utf-8")
    words = [*OPTIONS, "uniform or held_to_it or followed", *TESTS]
    return run(tree, "-c", IN_ONE.format(TESTS=words))


def test_three_places_are_enough() -> None:
    for title in ("An algorithm", "An engine"):
        places = {path for _, path, _ in STEP.findall(section(title)) if path.startswith("src")}
        assert 2 <= len(places) <= 3
    assert not STEP.findall(section("A reward"))


def test_a_page_that_is_out_of_date_is_found(tree: Path) -> None:
    with pytest.raises(AssertionError, match=r"train.py: the page is out of date"):
        follow(section("An algorithm"), tree)


def test_the_examples_keep_to_the_style(tree: Path) -> None:
    paths = sorted({path for _, path, _ in STEP.findall(PAGE)})
    reward = tree / "my_rewards.py"
    reward.write_text(block("python", section("A reward")), encoding="utf-8")
    for check in (["check"], ["format", "--check"]):
        run(tree, "-m", "ruff", *check, *paths, reward.name)


@pytest.mark.wide
def test_the_examples_reach_the_reference(tree: Path, said: str) -> None:
    reference = (tree / "docs" / "config.md").read_text(encoding="utf-8")
    for new in ("REINFORCE with the group's median", "Every token as likely"):
        assert new in reference


@pytest.mark.slow
def test_the_examples_have_the_types_and_keep_to_the_layers(tree: Path) -> None:
    paths = sorted({path for _, path, _ in STEP.findall(PAGE) if path.startswith("src")})
    run(tree, "-m", "pyright", "--pythonpath", sys.executable, *paths)
    run(tree, "-c", "from importlinter.cli import lint_imports_command as lint; lint()")


@pytest.mark.slow
def test_the_suite_of_algorithms_takes_the_new_one(tree: Path) -> None:
    words = (*OPTIONS, "median or configured_and_built", "tests/train/test_algorithms.py")
    assert " passed" in run(tree, "-m", "pytest", *words)


def test_an_algorithm_makes_a_gradient_step_and_an_engine_keeps_to_the_contract(said: str) -> None:
    assert re.search(r"2[23] passed", said), said


def test_a_reward_grades_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(block("python", section("A reward")))
    monkeypatch.chdir(tmp_path)
    run = config.parse(SMALLEST | yaml.safe_load(block("yaml", section("A reward"))))
    cases = (("about 3.4", 3), ("3.6", 3), ("three", 3), ("3", None))
    requests = [
        GradeRequest(
            attempt=AttemptId(i), prompt="?", completion=text, completion_ids=[1], row={"answer": a}
        )
        for i, (text, a) in enumerate(cases)
    ]
    grades = asyncio.run(_graded(GradingPool(run.rewards, run.grading), requests))
    assert [grades[i].rewards for i in range(4)] == [{"close": s} for s in (1.0, 0.0, 0.0, None)]
    assert [grades[i].reward for i in range(4)] == [1.0, 0.0, 0.0, None]


async def _graded(pool: GradingPool, requests: list[GradeRequest]) -> dict[int, Grade]:
    grades: dict[int, Grade] = {}
    done = asyncio.Event()

    def take(some: list[Grade]) -> None:
        grades.update({grade.attempt: grade for grade in some})
        if len(grades) == len(requests):
            done.set()

    pool.attach(asyncio.get_running_loop(), take)
    try:
        pool.submit(requests)
        await asyncio.wait_for(done.wait(), 60)
    finally:
        pool.close()
    return grades
