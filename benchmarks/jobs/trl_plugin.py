"""TRL's trainer with and without rounds of ours, in turn: wall time of a step.

    python -m benchmarks.jobs.trl_plugin program     # a sandboxed program for each response
    python -m benchmarks.jobs.trl_plugin remote      # a judge that is waited for
    python -m benchmarks.jobs.trl_plugin compare     # a comparison

Needs TRL: ``PYTHONPATH=.venv-trl/1.16.0 .venv-vllm/bin/python -m ...`` after ``make test-trl``.

The demo's model and task, its longer problems: half of the responses are short, the others reason
for up to 600 tokens. With ``--model FOLDER``: SmolLM2 of examples/smollm2, which adds numbers.
Every arm has the same data, learning rate and reward function; the first step of a run is left out.
Sampling is all that comes before the loss: responses, rewards, advantages.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset

from benchmarks._run import flags, listed, table, told
from rollpacker.demo.task import steps as lines_of
from rollpacker.demo.task import train_rows
from rollpacker.demo.warm_start import default_cache, warm_start
from rollpacker.sandbox import Sandbox, StdinTest
from rollpacker.trl import GRPOTrainer

ARMS: dict[str, str | None] = {"TRL": None, "off": "off", "exact": "exact", "race": "race"}
PROGRAM = """
first, second = map(int, input().split())
best = max(n for n in range(1, 200_000) if not first % n and not second % n)
print(best)
"""
"""Slow on purpose: about a fiftieth of a second of CPU."""
LEAST = 24
"""Lines of reasoning that a problem needs, of six tokens each."""


def text_of(completion: Any) -> str:
    """Of a message or of plain text."""
    return completion if isinstance(completion, str) else completion[0]["content"]


def answer_of(completion: Any) -> str:
    """What is said after the reasoning."""
    text = text_of(completion)
    return (text.rpartition("</think>")[2] or text).rpartition("Answer:")[2].strip()


def compared(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """One where the answer is right."""
    return [float(answer_of(c) == a) for c, a in zip(completions, answer, strict=True)]


async def remote(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The same from a service that takes 0.3 s at the median, and some times ten times as long."""

    async def one(completion: Any) -> None:
        digest = hashlib.blake2b(text_of(completion).encode(), digest_size=8).digest()
        place = (int.from_bytes(digest, "big") + 0.5) / 2**64
        await asyncio.sleep(0.3 * math.exp(statistics.NormalDist().inv_cdf(place)))

    await asyncio.gather(*map(one, completions))
    return compared(completions, answer)


def sandboxed(sandbox: Sandbox, threads: ThreadPoolExecutor) -> Callable[..., list[float]]:
    """One where a program in a sandbox prints what the response says; several at a time."""

    def judged(completions: list[Any], numbers: list[list[int]], **_: Any) -> list[float]:
        def one(completion: Any, pair: list[int]) -> float:
            test = StdinTest(stdin=f"{pair[0]} {pair[1]}\n", stdout=f"{answer_of(completion)}\n")
            return float(sandbox.run(PROGRAM, [test], 5.0).verdict == "pass")

        return list(threads.map(one, completions, numbers))

    return judged


def problems(count: int) -> list[dict[str, Any]]:
    """The demo's, those that need ``LEAST`` lines of reasoning."""
    return [
        {"prompt": row["question"], "answer": row["answer"], "numbers": row["metadata"]["numbers"]}
        for row in train_rows(6900)
        if len(lines_of(*row["metadata"]["numbers"])) >= LEAST
    ][:count]


def sums(count: int) -> list[dict[str, Any]]:
    """Numbers to add, with two examples before them."""
    rng = np.random.default_rng(0)
    shots = [
        message
        for asked, answer in (("4 + 3 + 7", "4 + 3 = 7, 7 + 7 = 14. Answer: 14"), ("5 + 3", "8"))
        for message in (
            {"role": "user", "content": f"Solve {asked} ="},
            {"role": "assistant", "content": answer},
        )
    ]
    rows = []
    for _ in range(count):
        terms = rng.integers(1, 99, rng.integers(2, 6)).tolist()
        asked = f"Solve {' + '.join(map(str, terms))} ="
        prompt = [*shots, {"role": "user", "content": asked}]
        rows.append({"prompt": prompt, "answer": str(sum(terms)), "numbers": terms})
    return rows


@dataclass(frozen=True)
class Setting:
    """What is trained: a model, its problems, responses of a step and their cap."""

    model: Path
    rows: Callable[[int], list[dict[str, Any]]]
    prompts: int
    responses: int
    cap: int


def timed(kind: Any) -> Any:
    """A trainer that notes how long each round of responses takes."""

    class Timed(kind):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            began = time.perf_counter()
            made = super()._generate_and_score_completions(inputs)
            self.__dict__.setdefault("sampling_s", []).append(time.perf_counter() - began)
            return made

    return Timed


def run_arm(arm: str, setting: Setting, folder: Path, steps: int, reward: Any) -> dict[str, float]:
    """One training; seconds of a step at the mean, and what it learnt from."""
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=setting.responses,
        steps_per_generation=setting.prompts,
        gradient_accumulation_steps=setting.prompts,
        num_generations=setting.responses,
        max_completion_length=setting.cap,
        max_steps=steps + 1,
        learning_rate=1e-5,
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    mode = ARMS[arm]
    more: dict[str, Any] = {} if mode is None else {"tail_batching": mode}
    trainer = timed(trl.GRPOTrainer if mode is None else GRPOTrainer)(
        model=str(setting.model),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(setting.rows(setting.prompts * (steps + 1))),
        **more,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "step_time" in line][1:]
    return {
        "sampling_s": statistics.mean(trainer.sampling_s[1:]),
        "step_s": statistics.mean(line["step_time"] for line in lines),
        "length": statistics.mean(line["completions/mean_length"] for line in lines),
        "longest": statistics.mean(line["completions/max_length"] for line in lines),
        "reward": statistics.mean(line["reward"] for line in lines),
    }


def main() -> None:
    parser = flags(__doc__, model=Path, steps=6, rounds=3, out=Path("runs/trl"))
    parser.add_argument("reward", choices=("program", "remote", "compare"))
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.model is None:
        setting = Setting(warm_start(default_cache()), problems, prompts=16, responses=8, cap=600)
    else:
        setting = Setting(arguments.model, sums, prompts=4, responses=4, cap=256)
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with ThreadPoolExecutor(4) as threads, Sandbox("standard", zygotes=4) as sandbox:
        rewards = {"program": sandboxed(sandbox, threads), "remote": remote, "compare": compared}
        reward = rewards[arguments.reward]
        for number in range(arguments.rounds):
            for arm in ARMS if number % 2 else reversed(ARMS):
                folder = arguments.out / f"{number}-{arm}"
                found[arm].append(run_arm(arm, setting, folder, arguments.steps, reward))
                print(json.dumps({"round": number, "arm": arm, **found[arm][-1]}), file=sys.stderr)
    head = ("arm", "sampling s", "over `off`", "step s", "over `off`")
    table((*head, "mean length", "longest", "reward"), (_row(arm, found) for arm in found))


def _row(arm: str, found: dict[str, list[dict[str, float]]]) -> list[str]:
    cells = [arm]
    for name in ("sampling_s", "step_s"):
        pairs = zip(found[arm], found["off"], strict=True)
        cells += told({name: "{:.2f}"}, found[arm])
        cells.append(listed([mine[name] / off[name] for mine, off in pairs]))
    return cells + told({"length": "{:.0f}", "longest": "{:.0f}", "reward": "{:.2f}"}, found[arm])


if __name__ == "__main__":
    main()
