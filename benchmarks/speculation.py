"""Decoding ahead on the demo's job: the same samples, decode steps, CPU seconds and time.

    python benchmarks/speculation.py --steps 60 --rounds 3 --out runs/speculation
    python benchmarks/speculation.py --steps 20 --rounds 5 --least 48 --prompts 4 --out runs/long

``--least N`` takes problems only that need so many lines of reasoning, of six tokens each;
``--prompts N`` are those of a step, of 8 responses each.

Runs alternate: `off` and `exact` without drafts, `exact` with; ratios are of the runs of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rollpacker.demo.run import Size, demo_config
from rollpacker.demo.task import steps, train_rows
from rollpacker.demo.warm_start import default_cache, warm_start
from rollpacker.job import train

ARMS = {
    "off": ("off", "off"),
    "exact, a token at a time": ("exact", "off"),
    "exact, ahead": ("exact", "auto"),
}
COLUMNS = {
    "decode_steps": "{:.0f}",
    "decode_cpu_s": "{:.2f}",
    "rollout_s": "{:.2f}",
    "step_s": "{:.2f}",
    "mean_length": "{:.0f}",
    "tokens": "{:.2f}",
    "last_tokens": "{:.2f}",
}


_ROWS = 6900
"""Problems of the demo's task, about all there are."""


def long_rows(file: Path, least: int) -> Path:
    """Those whose reasoning has at least so many lines, as JSON lines."""
    rows = [row for row in train_rows(_ROWS) if len(steps(*row["metadata"]["numbers"])) >= least]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def run_arm(
    model: Path, folder: Path, arm: str, size: Size, prompts: int, overrides: dict[str, Any]
) -> dict[str, Any]:
    """One run; what it took in all."""
    mode, speculation = ARMS[arm]
    config = demo_config(model, folder, mode, size, overrides)
    rollout = config.rollout.model_copy(
        update={
            "prompts_per_step": prompts,
            "speculation": config.rollout.speculation.model_copy(update={"mode": speculation}),
        }
    )
    train(config.model_copy(update={"rollout": rollout}))
    summary = json.loads((folder / "summary.json").read_text())
    told = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    drafting = [step for step in told if step["speculation/drafted"]]
    return {
        "arm": arm,
        "decode_steps": summary["decode_steps"],
        "decode_cpu_s": summary["timing_s"]["decode_cpu"],
        "rollout_s": summary["timing_s"]["rollout"],
        "step_s": summary["timing_s"]["steps"],
        "mean_length": _mean(told, "completions/mean_length"),
        "tokens": _mean(drafting, "speculation/tokens_per_verification"),
        "last_tokens": _mean(drafting, "speculation/last_tokens_per_verification"),
    }


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(step[name] for step in steps) if steps else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--least", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("runs/speculation"))
    arguments = parser.parse_args()
    model = warm_start(default_cache())
    size = Size(steps=arguments.steps, held_out=50)
    overrides: dict[str, Any] = {}
    if arguments.least:
        file = long_rows(arguments.out / "rows.jsonl", arguments.least)
        overrides = {"data": {"path": str(file)}}
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for arm in ARMS:
            folder = arguments.out / f"{number}-{arm.replace(', ', '-').replace(' ', '-')}"
            row = run_arm(model, folder, arm, size, arguments.prompts, overrides)
            rows.append({"round": number, **row})
    print("| arm | " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---|" * len(COLUMNS))
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        cells = [form.format(statistics.median(r[n] for r in mine)) for n, form in COLUMNS.items()]
        print(f"| {arm} | " + " | ".join(cells) + " |")
    for base in ("off", "exact, a token at a time"):
        for name in ("decode_steps", "decode_cpu_s", "rollout_s", "step_s"):
            by = {(row["round"], row["arm"]): row[name] for row in rows}
            ratios = [by[n, "exact, ahead"] / by[n, base] for n in range(arguments.rounds)]
            listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{name}: ahead / {base}: {listed} (median {statistics.median(ratios):.2f})")


if __name__ == "__main__":
    main()
