"""``examples/tools`` with a calculator that takes its time, a lognormal one.

    python examples/tools/prepare.py                  # once: the model
    python -m benchmarks.programs.slow_tools modes --steps 24
    python -m benchmarks.programs.slow_tools kv --steps 12

``modes``: each mode's run, and how much of turns, tokens and waiting it keeps. ``kv``: with less
and less room for the KV cache, how many of the tokens with which later turns begin are computed
again. Runs that are there already are not repeated.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks._run import ROOT, flags, made, metrics, table
from rollpacker.config import RunConfig, load
from rollpacker.job import train
from rollpacker.runtime.record.progress import Progress
from rollpacker.user_code import find

EXAMPLE = ROOT / "examples" / "tools"
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
    if not made(folder):
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


def mean(steps: list[dict[str, Any]], name: str) -> float:
    """Over the steps that have it."""
    values = [row[name] for row in steps if name in row]
    return sum(values) / len(values) if values else math.nan


def modes(out: Path, steps: int) -> None:
    """A row for each mode."""
    head = ("mode", "step", "waited for, a response", f"kept / true {' / '.join(BIAS.values())}")
    table(head, (_mode(mode, out / mode, steps) for mode in MODES))


def _mode(mode: str, folder: Path, steps: int) -> tuple[str, ...]:
    ran(folder, steps, f"rollout.tail_batching.mode={mode}")
    done = metrics(folder)
    bias = (done[-1].get(f"tail/audited_kept_vs_true_{name}") for name in BIAS)
    return (
        f"`{mode}`",
        f"{mean(done, 'step_time'):.2f} s",
        f"{mean(done, 'environment/wait_s'):.2f} s",
        " / ".join("1" if value is None else f"{value:.2f}" for value in bias),
    )


def later_context(folder: Path) -> int:
    """Tokens with which later turns begin and which an engine has seen before."""
    turns = pl.read_parquet(folder / "samples" / "*.parquet").select(
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
    table(
        ("KV tokens", "computed again", "prefilled tokens", "preemptions", "decode CPU"),
        (row for size in KV_TOKENS for row in _cache(size, out / f"kv-{size}", steps)),
    )


def _cache(size: int, folder: Path, steps: int) -> Iterator[tuple[Any, ...]]:
    done = metrics(ran(folder, steps, f"engine.kv_tokens={size}"))
    context = later_context(folder)
    names = ("cached_tokens", "prefill_tokens", "preemptions")
    cached, prefilled, preempted = (sum(row[f"engine/{n}"] for row in done) for n in names)
    decode_s = sum(row["timing_s/decode_cpu"] for row in done)
    again = f"{1.0 - cached / context:.1%}"
    yield size or "enough", again, f"{prefilled:,}", preempted, f"{decode_s:.1f} s"
    if not size:
        yield "enough, keeping none (computed)", "100.0%", f"{prefilled + cached:,}", "", ""


def main() -> None:
    """Run what is not there, and print the table."""
    parser = flags(__doc__, steps=24, out=Path("runs/slow-tools"))
    parser.add_argument("table", choices=["modes", "kv"])
    arguments = parser.parse_args()
    {"modes": modes, "kv": kv}[arguments.table](arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
