"""TRL's trainer with and without rounds of ours, in turn: wall time of a step.

    python benchmarks/trl_plugin.py program     # a sandboxed program for each response
    python benchmarks/trl_plugin.py remote      # a judge that is waited for
    python benchmarks/trl_plugin.py compare     # a comparison

The demo's model and task, its longer problems: half of the responses are short, the others reason for
up to 600 tokens. Every arm has the same data, learning rate and reward function; the first step of a
run is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset

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
PROMPTS, RESPONSES = 16, 8
LEAST = 24
"""Lines of reasoning that a problem needs, of six tokens each."""


def answer_of(completion: str) -> str:
    """What is said after the reasoning."""
    return completion.rpartition("</think>")[2].strip()


def compared(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """One where the answer is right."""
    return [float(answer_of(c) == a) for c, a in zip(completions, answer, strict=True)]


async def remote(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The same from a service that takes 0.3 s at the median, and some times ten times as long."""

    async def one(completion: str) -> None:
        digest = hashlib.blake2b(completion.encode(), digest_size=8).digest()
        place = (int.from_bytes(digest, "big") + 0.5) / 2**64
        await asyncio.sleep(0.3 * math.exp(statistics.NormalDist().inv_cdf(place)))

    await asyncio.gather(*map(one, completions))
    return compared(completions, answer)


def sandboxed(sandbox: Sandbox, threads: ThreadPoolExecutor) -> Callable[..., list[float]]:
    """One where a program in a sandbox prints what the response says; several at a time."""

    def judged(completions: list[str], numbers: list[list[int]], **_: Any) -> list[float]:
        def one(completion: str, pair: list[int]) -> float:
            test = StdinTest(stdin=f"{pair[0]} {pair[1]}\n", stdout=f"{answer_of(completion)}\n")
            return float(sandbox.run(PROGRAM, [test], 5.0).verdict == "pass")

        return list(threads.map(one, completions, numbers))

    return judged


def run_arm(arm: str, model: Path, folder: Path, steps: int, reward: Any) -> dict[str, float]:
    """One training; seconds of a step at the mean, and what it learnt from."""
    rows = [
        {"prompt": row["question"], "answer": row["answer"], "numbers": row["metadata"]["numbers"]}
        for row in train_rows(6900)
        if len(lines_of(*row["metadata"]["numbers"])) >= LEAST
    ][: PROMPTS * (steps + 1)]
    arguments = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=PROMPTS * RESPONSES,
        num_generations=RESPONSES,
        max_completion_length=600,
        max_steps=steps + 1,
        learning_rate=3e-4,
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
    kind = trl.GRPOTrainer if mode is None else GRPOTrainer
    more = {} if mode is None else {"tail_batching": mode}
    trainer = kind(
        model=str(model),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        **more,
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "step_time" in line][1:]
    return {
        "step_s": statistics.mean(line["step_time"] for line in lines),
        "length": statistics.mean(line["completions/mean_length"] for line in lines),
        "longest": statistics.mean(line["completions/max_length"] for line in lines),
        "reward": statistics.mean(line["reward"] for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("reward", choices=("program", "remote", "compare"))
    parser.add_argument("--out", type=Path, default=Path("runs/trl"))
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    model = warm_start(default_cache())
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    with ThreadPoolExecutor(4) as threads, Sandbox("standard", zygotes=4) as sandbox:
        rewards = {"program": sandboxed(sandbox, threads), "remote": remote, "compare": compared}
        reward = rewards[arguments.reward]
        for number in range(arguments.rounds):
            for arm in ARMS if number % 2 else reversed(ARMS):
                folder = arguments.out / f"{number}-{arm}"
                found[arm].append(run_arm(arm, model, folder, arguments.steps, reward))
                print(json.dumps({"round": number, "arm": arm, **found[arm][-1]}), file=sys.stderr)
    print("| arm | seconds of a step | over `off` | mean length | longest | reward |")
    print("|---|---|---|---|---|---|")
    for arm, runs in found.items():
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        pairs = zip(runs, found["off"], strict=True)
        ratios = [mine["step_s"] / off["step_s"] for mine, off in pairs]
        print(
            f"| {arm} | {median['step_s']:.2f} | {statistics.median(ratios):.2f} "
            f"({', '.join(f'{ratio:.2f}' for ratio in ratios)}) | {median['length']:.0f} "
            f"| {median['longest']:.0f} | {median['reward']:.2f} |"
        )


if __name__ == "__main__":
    main()
