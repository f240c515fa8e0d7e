"""A judge that runs out of memory in a job: batches shrink, and no score is invented."""

import json
from io import StringIO

import polars as pl
from judge_models import request, save_judge
from rich.console import Console
from transformers import AutoTokenizer

from rollpacker import config, job
from rollpacker.core import sample_table as samples
from rollpacker.reward.judge.judge import Judge
from rollpacker.reward.judge.options import JudgeOptions
from rollpacker.runtime.record.progress import Progress

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
