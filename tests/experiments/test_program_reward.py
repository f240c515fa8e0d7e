"""The reward that burns CPU time: its verdicts are right, its timeouts the policy's."""

import importlib.util
import time
from pathlib import Path

import pytest

from rollpacker.demo.task import chain_of_thought, train_rows
from rollpacker.reward.base import GradeRequest
from rollpacker.reward.functions import resolve

FILE = Path(__file__).parents[2] / "experiments" / "fig13" / "program.py"


@pytest.fixture
def program():
    spec = importlib.util.spec_from_file_location("program", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spent(program, text: str, row: dict, *, adaptive: bool) -> tuple[list[float], list[float]]:
    given = ([text], [row["id"]], [row["answer"]], [row["metadata"]], adaptive)
    began = time.process_time()
    scores, seconds = program.reward(*given), program.seconds(*given)
    assert time.process_time() - began >= seconds[0]
    return scores, seconds


def test_a_wrong_answer_stops_at_the_timeout_that_right_ones_have_set(program) -> None:
    row = train_rows(1)[0]
    right = chain_of_thought(*row["metadata"]["numbers"])
    wrong = "</think>0"
    needed = program.UNIT_S * max(row["metadata"]["numbers"])
    assert spent(program, wrong, row, adaptive=True) == ([0.0], [program.MOST_S])
    assert spent(program, right, row, adaptive=True) == ([1.0], [needed])
    limit = min(max(program.LEAST_S, 1.5 * needed), program.MOST_S)
    assert spent(program, wrong, row, adaptive=True) == ([0.0], [limit])
    assert spent(program, wrong, row, adaptive=False) == ([0.0], [program.MOST_S])


def test_it_agrees_with_the_tasks_own_scorer(monkeypatch) -> None:
    monkeypatch.chdir(FILE.parents[2])
    ours = resolve("experiments/fig13/program.py:reward", {"adaptive": True})
    scorer = resolve("rg", {"require_think_end": True})
    for row in train_rows(5):
        right = chain_of_thought(*row["metadata"]["numbers"])
        for text in (right, "</think>0", right.partition("</think>")[0]):
            request = GradeRequest(
                attempt=0, prompt=row["prompt"], completion=text, completion_ids=(), row=row
            )
            assert ours([request]) == scorer([request])
