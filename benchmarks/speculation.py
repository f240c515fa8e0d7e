"""Decoding ahead on the demo's job: the same samples, decode steps, CPU seconds and time.

    python benchmarks/speculation.py --steps 60 --rounds 3 --out runs/speculation

Runs alternate: `off` and `exact` without drafts, `exact` with; ratios are of the runs of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rollpacker.demo.run import Size, demo_config
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
    "tokens": "{:.2f}",
    "last_tokens": "{:.2f}",
}


def run_arm(model: Path, folder: Path, arm: str, size: Size) -> dict[str, Any]:
    """One run; what it took in all."""
    mode, speculation = ARMS[arm]
    config = demo_config(model, folder, mode, size)
    rollout = config.rollout.model_copy(
        update={"speculation": config.rollout.speculation.model_copy(update={"mode": speculation})}
    )
    train(config.model_copy(update={"rollout": rollout}))
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    drafting = [step for step in steps if step["speculation/drafted"]]
    return {
        "arm": arm,
        "decode_steps": summary["decode_steps"],
        "decode_cpu_s": summary["timing_s"]["decode_cpu"],
        "rollout_s": summary["timing_s"]["rollout"],
        "step_s": summary["timing_s"]["steps"],
        "tokens": _mean(drafting, "speculation/tokens_per_verification"),
        "last_tokens": _mean(drafting, "speculation/last_tokens_per_verification"),
    }


def _mean(steps: list[dict[str, Any]], name: str) -> float:
    return statistics.mean(step[name] for step in steps) if steps else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/speculation"))
    arguments = parser.parse_args()
    model = warm_start(default_cache())
    size = Size(steps=arguments.steps, held_out=50)
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for arm in ARMS:
            folder = arguments.out / f"{number}-{arm.replace(', ', '-').replace(' ', '-')}"
            rows.append({"round": number, **run_arm(model, folder, arm, size)})
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
