"""``examples/tools`` with a calculator that takes its time, a lognormal one.

    python examples/tools/prepare.py                  # once: the model
    python benchmarks/slow_tools.py modes --steps 24
    python benchmarks/slow_tools.py kv --steps 12

``modes``: each mode's run, how much of turns, tokens and waiting it keeps, whether its journal
replays, and how near the simulator comes to steps that were held back. ``kv``: with less and less
room for the KV cache, how many of the tokens with which later turns begin are computed again. Runs
that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import polars as pl

from rollpacker.config import RunConfig, load
from rollpacker.core.journal import replay
from rollpacker.find import find
from rollpacker.job import train
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.record.progress import Progress
from rollpacker.sim.recorded.rerun import held_back
from rollpacker.sim.recorded.run_record import read_run

EXAMPLE = Path(__file__).parents[1] / "examples" / "tools"
MODES = ("off", "exact", "race", "auto")
CALCULATE = find(f"{EXAMPLE / 'tools.py'}:calculate")
KV_TOKENS = (0, 4096, 2048, 1024, 512)
MEDIAN_S, SIGMA = 0.3, 1.0
BIAS = {"len": "tokens", "turns": "turns", "wait": "waiting"}


async def calculate(expression: str) -> str:
    """Calculate the value of an expression.

    Args:
        expression: Whole numbers with +, - and *.

    Returns:
        The value.
    """
    await asyncio.sleep(random.lognormvariate(math.log(MEDIAN_S), SIGMA))
    return CALCULATE(expression)


def ran(folder: Path, steps: int, *more: str) -> Path:
    """The folder of a run, which is made if it is not there."""
    if not (folder / "summary.json").exists():
        changes = [
            f"output={folder}",
            f"steps={steps}",
            f"environment.path={__file__}:calculate",
            "rollout.tail_batching.audit_every=3",
            *more,
        ]
        config: RunConfig = load(EXAMPLE / "train.yaml", changes)
        train(config.model_copy(update={"eval": None}), progress=Progress(every=steps))
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    """Metrics by step."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean(metrics: list[dict[str, Any]], name: str) -> float:
    """Over the steps that have it."""
    values = [row[name] for row in metrics if name in row]
    return sum(values) / len(values) if values else math.nan


def modes(out: Path, steps: int) -> None:
    """A row for each mode."""
    print(
        "| mode | step | waited for, a response | kept / true " + " / ".join(BIAS.values()), end=""
    )
    print(" | journal | each held-back step | its rollout | sum of steps |")
    print("|---|--:|--:|--:|---|--:|--:|--:|")
    for mode in MODES:
        folder = ran(out / mode, steps, f"rollout.tail_batching.mode={mode}")
        metrics = rows(folder)
        last = metrics[-1]
        bias = (last.get(f"tail/audited_kept_vs_true_{name}") for name in BIAS)
        kept = " / ".join("1" if value is None else f"{value:.2f}" for value in bias)
        differences = len(replay(folder / "journal.jsonl", from_journal).differences)
        found = held_back(read_run(folder))
        rollout = found.phases["rollout"].mean
        print(
            f"| `{mode}` | {mean(metrics, 'step_time'):.2f} s | "
            f"{mean(metrics, 'environment/wait_s'):.2f} s | {kept} | {differences} differences | "
            f"{found.accuracy_mean:.1%} | {rollout:.1%} | {found.total:.1%} |"
        )


def later_context(folder: Path) -> int:
    """Tokens with which later turns begin and which an engine has seen before."""
    turns = pl.read_parquet(folder / "samples.parquet").select(
        "prompt_tokens", "turn_tokens", "added_tokens"
    )
    total = 0
    for prompt, sampled, added in turns.iter_rows():
        known = prompt
        for turn, tokens in enumerate(sampled[:-1]):
            known += tokens + (added[turn - 1] if turn else 0)
            total += known - 1  # the last one has no KV yet
    return total


def kv(out: Path, steps: int) -> None:
    """A row for each size of the cache."""
    print("| KV tokens | computed again | prefilled tokens | preemptions | decode CPU |")
    print("|---|--:|--:|--:|--:|")
    for size in KV_TOKENS:
        folder = ran(out / f"kv-{size}", steps, f"engine.kv_tokens={size}")
        metrics, context = rows(folder), later_context(folder)
        names = ("cached_tokens", "prefill_tokens", "preemptions")
        cached, prefilled, preempted = (sum(row[f"engine/{n}"] for row in metrics) for n in names)
        decode_s = sum(row["timing_s/decode_cpu"] for row in metrics)
        print(
            f"| {size or 'enough'} | {1.0 - cached / context:.1%} | {prefilled:,} | {preempted} | "
            f"{decode_s:.1f} s |"
        )
        if not size:
            print(f"| enough, keeping none (computed) | 100.0% | {prefilled + cached:,} | | |")


def main() -> None:
    """Run what is not there, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["modes", "kv"])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("runs/slow-tools"))
    arguments = parser.parse_args()
    {"modes": modes, "kv": kv}[arguments.table](arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
