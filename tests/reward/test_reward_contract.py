"""What holds for every kind of reward function, however it is written."""

import copy
import math

import pytest
import reasoning_gym

from case_files import read_table
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest, Scored
from rollpacker.reward.functions import Scorer, resolve

CODE = """
def trl(completions, answer, **columns):
    return [float(a in str(c)) for c, a in zip(completions, answer)]

async def trl_async(prompts, completions, completion_ids, **columns):
    return [len(ids) / 10 for ids in completion_ids]

def trl_some(completions, **columns):
    return [float(len(c)) if len(c) % 2 else None for c in completions]

def verl(data_source, solution_str, ground_truth, extra_info):
    return 1.0 if ground_truth in solution_str else 0.0

def verl_dict(solution_str, ground_truth, **kwargs):
    return {"score": len(solution_str), "kind": "length"}
"""
KINDS = ["math", "rg", "trl", "trl_async", "trl_some", "verl", "verl_dict"]
TEXTS = [*read_table(__file__, "TEXTS"), "</think>" * 50, "{answer} " * 200]


@pytest.fixture(scope="module")
def row() -> dict:
    entry = reasoning_gym.create_dataset("gcd", size=1, seed=0)[0]
    return entry | {"rg_task": "gcd", "rg_options": {}, "id": "a", "data_source": "gcd"}


@pytest.fixture(params=KINDS)
def score(request, tmp_path) -> Scorer:
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    kind = request.param
    return resolve(kind if kind in ("math", "rg") else f"{path}:{kind}", {})


@pytest.fixture(params=["text", "chat"])
def some(request, row) -> list[GradeRequest]:
    prompt = row["question"]
    if request.param == "chat":
        prompt = [{"role": "user", "content": prompt}]
    return [
        GradeRequest(
            attempt=AttemptId(i),
            prompt=prompt,
            completion=text.format(answer=row["answer"]),
            completion_ids=list(range(i)),
            row=row,
        )
        for i, text in enumerate(TEXTS)
    ]


def test_one_finite_score_each_alone_or_together_again_and_again(score, some):
    before = copy.deepcopy([(r.prompt, r.completion, r.completion_ids, r.row) for r in some])
    together = score(some)
    assert len(together) == len(some)
    scores = [each.score if isinstance(each, Scored) else each for each in together]
    assert all(s is None or (type(s) is float and math.isfinite(s)) for s in scores)
    assert [s for request in some for s in score([request])] == together
    assert score(some[::-1]) == together[::-1]
    assert [(r.prompt, r.completion, r.completion_ids, r.row) for r in some] == before
