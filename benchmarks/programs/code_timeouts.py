"""Adaptive timeouts of programs against a fixed one (the paper's figure 13c), in real runs.

    python -m benchmarks.programs.code_timeouts --steps 2 --prompts 4 --out runs/code-timeouts

The job is examples/code: rollout with asynchronous code rewards, some programs never end. Both arms
use the same seeds, and a learning rate so small that the model stays as it is: they grade the
same programs. `--scale 0.1` makes all timeouts a tenth, for more steps in the same time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks._run import ROOT, flags, made, metrics, table
from rollpacker.config import load
from rollpacker.job import train

LEAST_S, MOST_S = 2.0, 30.0
ARMS = ("fixed", "adaptive")
KEY = ["step", "prompt", "sample_index"]
TIMEOUTS = ("tle_cpu", "tle_idle")


def run_arm(arm: str, arguments: argparse.Namespace) -> Path:
    folder = arguments.out / arm
    if made(folder):
        return folder
    timeout = {
        "adaptive": arm == "adaptive",
        "least_s": LEAST_S * arguments.scale,
        "most_s": MOST_S * arguments.scale,
    }
    overrides = {
        "output": str(folder),
        "seed": arguments.seed,
        "steps": arguments.steps,
        "model.path": str(arguments.model),
        "data.path": f"{ROOT / 'examples' / 'code' / 'problems.py'}:train_rows",
        "data.options.size": arguments.steps * arguments.prompts,
        "rollout.prompts_per_step": arguments.prompts,
        "rollout.tail_batching.mode": arguments.mode,
        "train.learning_rate": 1e-12,
        "eval": "null",
        **{f"grading.code_timeout.{key}": json.dumps(value) for key, value in timeout.items()},
    }
    config = load(
        ROOT / "examples" / "code" / "train.yaml", [f"{k}={v}" for k, v in overrides.items()]
    )
    train(config)
    return folder


def measured(folder: Path) -> dict[str, Any]:
    steps = metrics(folder)
    samples = pl.read_parquet(folder / "samples.parquet")
    return {
        "step_s": [step["step_time"] for step in steps],
        "program_cpu_s": sum(step["rewards/code/cpu_s"] for step in steps),
        "timeouts": samples.filter(pl.col("code_verdict").is_in(TIMEOUTS)).height,
        "programs": samples.filter(pl.col("code_verdict").is_not_null()).height,
        "samples": samples,
    }


def compare(found: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Programs that both arms have run, and how many of them had another reward."""
    columns = [*KEY, "tokens", "reward", "code_verdict"]
    fixed, adaptive = (found[arm]["samples"].select(columns) for arm in ARMS)
    both = fixed.join(adaptive, on=[*KEY, "tokens"], suffix="_adaptive")
    both = both.filter(
        pl.col("code_verdict").is_not_null() & pl.col("code_verdict_adaptive").is_not_null()
    )
    right = both.filter(pl.col("code_verdict") == "pass")
    other = pl.col("reward") != pl.col("reward_adaptive")
    return {
        "both": both.height,
        "right": right.height,
        "right_with_another_reward": right.filter(other).height,
        "any_with_another_reward": both.filter(other).height,
    }


def show(found: dict[str, dict[str, Any]]) -> None:
    head = ("arm", "step, s (mean)", "each step, s", "CPU s of programs", "programs", "timeouts")
    table(
        head,
        (
            (
                arm,
                f"{statistics.mean(one['step_s']):.1f}",
                ", ".join(f"{seconds:.1f}" for seconds in one["step_s"]),
                f"{one['program_cpu_s']:.1f}",
                one["programs"],
                one["timeouts"],
            )
            for arm, one in found.items()
        ),
    )
    wall = [statistics.mean(found[arm]["step_s"]) for arm in ARMS]
    cpu = [found[arm]["program_cpu_s"] for arm in ARMS]
    same = compare(found)
    print(
        f"\nadaptive is {wall[0] / wall[1]:.2f}x as fast by wall time a step, and takes "
        f"{cpu[1] / cpu[0]:.0%} of the CPU time of programs"
    )
    print(
        f"{same['both']} programs were run in both arms, {same['right']} of them right; another "
        f"reward: {same['right_with_another_reward']} of the right ones, "
        f"{same['any_with_another_reward']} of all"
    )


def main() -> None:
    arguments = flags(
        __doc__,
        steps=2,
        prompts=4,
        scale=(1.0, "of the timeouts, 2 and 30 s"),
        mode="exact",
        seed=0,
        model=(Path("runs/code-warm-start"), "made if need be"),
        out=Path("runs/code-timeouts"),
    ).parse_args()
    prepare = [sys.executable, str(ROOT / "examples" / "code" / "prepare.py")]
    subprocess.run([*prepare, str(arguments.model)], check=True, stdout=subprocess.DEVNULL)
    show({arm: measured(run_arm(arm, arguments)) for arm in ARMS})


if __name__ == "__main__":
    main()
