"""The judge as a reward: by name, in grading processes, in a job."""

import json
from dataclasses import replace
from functools import partial
from io import StringIO

import polars as pl
import pytest
import yaml
from judge_models import request, save_critic, save_judge
from rich.console import Console
from transformers import AutoTokenizer

from grading import grade_now
from rollpacker import config, job
from rollpacker.config import ConfigError, GradingConfig, RewardConfig, load
from rollpacker.core import sample_table as samples
from rollpacker.reward.functions import resolve
from rollpacker.reward.judge.judge import Judge
from rollpacker.reward.judge.options import JudgeOptions
from rollpacker.reward.processes.pool import GradingPool
from rollpacker.runtime.record.progress import Progress

TEMPLATE = "Q {prompt} R {reference} A {completion} G"


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = save_judge(tmp_path_factory.mktemp("judge"))
    return {"model": str(folder), "template": TEMPLATE, "yes": "Y", "no": "N", "resident": 1}


def test_a_judge_is_found_by_name_and_loaded_once(options):
    requests = [request(i, text) for i, text in enumerate(("2", "3", "two"))]
    scorer = resolve("judge", options)
    expected = Judge(JudgeOptions(**options)).grade(requests)
    assert scorer(requests) == expected
    assert [scorer([r])[0] for r in requests] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [({"residents": 3}, "rewards: judge: .*residents.*resident"), ({"mode": "vote"}, "mode")],
)
def test_unknown_options_are_named(options, change, problem):
    with pytest.raises(ConfigError, match=problem):
        resolve("judge", options | change)


@pytest.fixture(scope="module")
def critic(tmp_path_factory):
    return str(save_critic(tmp_path_factory.mktemp("reward") / "critic"))


@pytest.fixture(scope="module")
def pool(options, critic):
    """One process, which loads libraries for seconds, with three judges: of whole groups, in
    calls of four, and with little room for the rows of a domain of their own; and with a model
    that scores."""
    of = partial(RewardConfig, function="judge", timeout_s=100.0)
    made = GradingPool(
        [
            of(name="group", options=options, needs_group=True, domains=["default"]),
            of(name="fours", options=options, batch=4, domains=["default"]),
            of(name="short", options=options | {"max_tokens": 60}, domains=["short"]),
            RewardConfig(function=critic, batch=8, timeout_s=60, domains=["scored"]),
        ],
        GradingConfig(retries=0),
    )
    made.wait_ready()
    yield made
    made.close()


def test_grading_processes_judge_groups_and_batches(options, pool):
    texts = ["2", "3", "two", "no idea", "2 of course", "1", "22", "no", "4", "five?"]
    requests = [request(i, text) for i, text in enumerate(texts)]
    judge = Judge(JudgeOptions(**options))
    alone = [judge.grade([each])[0] for each in requests]
    grades = grade_now(pool, requests, group=True)
    assert len({round(score, 4) for score in alone}) > 5
    assert [g.rewards["group"] for g in grades] == pytest.approx(judge.grade(requests), abs=1e-5)
    assert [g.rewards["group"] for g in grades] == pytest.approx(alone, abs=1e-5)
    assert [g.rewards["fours"] for g in grades] == pytest.approx(alone, abs=1e-5)
    assert {g.rewards["short"] for g in grades} == {None}


def test_a_response_that_cannot_be_judged_harms_no_other(pool):
    reward = RewardConfig(function="judge")
    assert (reward.call_size, reward.call_limit_s) == (16, 300.0)
    texts = ("2", "3" * 80, "two", "2!")
    requests = [replace(request(i, text), domain="short") for i, text in enumerate(texts)]
    grades = grade_now(pool, requests, group=True)
    assert [g.reward is None for g in grades] == [False, True, False, False]
    assert "tokens too long" in (grades[1].error or "")
    assert len(pool.said()) == 1


def test_a_reward_model_runs_with_shared_calls(critic, pool):
    requests = [
        replace(request(i, text, "7="), domain="scored") for i, text in enumerate(("1", "12+", "3"))
    ]
    grades = grade_now(pool, requests, group=True)
    assert [set(grade.rewards) for grade in grades] == [{"critic", "group", "fours", "short"}] * 3
    scores = [grade.rewards["critic"] for grade in grades]
    assert scores == pytest.approx(resolve(critic, {})(requests), abs=1e-5)
    assert [grade.reward for grade in grades] == scores


def test_a_missing_model_is_named_while_the_function_is_loaded(options):
    with pytest.raises(ValueError, match="judge: model=/no/model: there is no such folder"):
        resolve("judge", options | {"model": "/no/model"})


@pytest.mark.slow
def test_a_job_trains_on_a_judges_scores(options, tmp_path):
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tree = {
        "output": str(tmp_path / "run"),
        "steps": 2,
        "model": {"path": options["model"]},
        "data": {"path": str(tmp_path / "rows.jsonl"), "chat": False},
        "rewards": [{"function": "judge", "options": options, "timeout_s": 100.0}],
        "rollout": {"prompts_per_step": 2, "num_generations": 3, "max_completion_length": 12},
        "devices": {"per_node": 1, "pin": False, "kind": "cpu"},
        "checkpoint": {"every": 0},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    folder = job.train(load(tmp_path / "job.yaml"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 2
    assert all(0.0 < step["rewards/judge/mean"] < 1.0 for step in steps)
    assert all(step["frac_reward_zero_std"] < 1.0 for step in steps)


# A judge that runs out of memory in a job: batches shrink, and no score is invented.


# Loaded by the grading process beside the judge: its model has no room for three prompts at once,
# nor for any prompt with this token.
FAULT = """
import json
import torch
from torch import nn

def full(module, inputs):
    if isinstance(module, nn.Embedding):
        ids = inputs[0]
        if len(ids) > 2 or (ids == {token}).any():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

nn.modules.module.register_module_forward_pre_hook(full)

def nothing(prompts, completions, **_):
    with open({seen!r}, "a", encoding="utf-8") as file:
        for pair in zip(prompts, completions):
            file.write(json.dumps(pair) + "\\n")
    return [0.0] * len(completions)
"""
LETTER = "e"


def test_a_job_whose_judge_runs_out_of_memory_invents_no_score(tmp_path):
    folder = save_judge(tmp_path / "judge")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (token,) = tokenizer(LETTER, add_special_tokens=False)["input_ids"]
    seen = tmp_path / "seen"
    fault = FAULT.format(token=token, seen=str(seen))
    (tmp_path / "fault.py").write_text(fault, encoding="utf-8")
    rows = [{"id": f"p{i}", "prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = {
        "model": str(folder),
        "template": "Q {prompt} R {reference} A {completion} G",
        "yes": "Y",
        "no": "N",
        "resident": 1,
    }
    tree = {
        "output": str(tmp_path / "run"),
        "epochs": 1,
        "model": {"path": str(folder)},
        "data": {"path": str(tmp_path / "rows.jsonl"), "chat": False},
        "rewards": [
            {"function": "judge", "options": options, "timeout_s": 100.0},
            {"function": f"{tmp_path / 'fault.py'}:nothing"},
        ],
        "rollout": {"prompts_per_step": 2, "num_generations": 3, "max_completion_length": 12},
        "devices": {"per_node": 1, "pin": False, "kind": "cpu"},
        "checkpoint": {"every": 0},
    }
    said = StringIO()
    run = job.train(config.parse(tree), progress=Progress(Console(file=said, width=400)))
    steps = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    assert all(0.0 < step["rewards/judge/mean"] < 1.0 for step in steps)
    table = samples.read(run)
    kept = table.filter(pl.col("state") == "kept")
    trained = kept.select("step", "prompt").unique()
    assert sorted(trained["prompt"]) == sorted(row["id"] for row in rows)
    lost = table.filter(pl.col("state") == "failed")
    assert len(lost)
    assert lost["reward"].null_count() == len(lost)
    # What was kept has the score of a judge with room for it, and could be judged.
    pairs = [json.loads(line) for line in seen.read_text(encoding="utf-8").splitlines()]
    judged = [pair for pair in pairs if LETTER not in pair[1]]
    assert len(judged) < len(pairs)
    answers = {row["prompt"]: row["answer"] for row in rows}
    scores = Judge(JudgeOptions(**options)).grade(
        [request(i, text, q, answer=answers[q]) for i, (q, text) in enumerate(judged)]
    )
    for reward in kept["reward"]:
        assert min(abs(reward - score) for score in scores) < 1e-4
    lines = said.getvalue().splitlines()
    faults = [line for line in lines if "the judge ran out of memory" in line]
    named = [line for line in faults if "reward of prompt" in line]
    assert len(named) == len(lost)
    # What was mended is said once for each way of mending it.
    assert 1 <= len(faults) - len(named) <= 2 * len(trained)
