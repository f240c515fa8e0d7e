"""Modes side by side on the demo's job: wall time a step, accuracy, bias, over several seeds.

    python benchmarks/modes.py --seeds 3 --steps 135 --out runs/modes

`off` runs in every thread setting that two cores allow, `exact` and `race` on two workers. Runs
alternate, so that drift of a shared machine hits all alike; ratios are of the runs of one seed.
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

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "off, 2 workers": ("off", {"per_node": 2}),
    "off, 1 worker, 2 threads": ("off", {"per_node": 1, "threads": 2}),
    "off, 1 worker, 1 thread": ("off", {"per_node": 1}),
    "exact, 2 workers": ("exact", {"per_node": 2}),
    "race, 2 workers": ("race", {"per_node": 2}),
    "race, 1 worker, 1 thread": ("race", {"per_node": 1}),
}


def run_arm(model: Path, out: Path, seed: int, arm: str, size: Size) -> dict[str, Any]:
    mode, devices = ARMS[arm]
    name = arm.replace(", ", "-").replace(" ", "")
    folder = out / f"seed{seed}" / name
    if not (folder / "summary.json").exists():
        train(demo_config(model, folder, mode, size, {"seed": seed, "devices": devices}))
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timing, after = summary["timing_s"], summary["after"]
    quarter = steps[-max(1, len(steps) // 4) :]
    return {
        "arm": arm,
        "seed": seed,
        "step_s": statistics.mean(s["step_time"] for s in steps),
        "rollout_s": timing["rollout"] / summary["steps"],
        "cpu_s": timing["worker_cpu"] / summary["steps"],
        "decode_steps": summary["decode_steps"] / summary["steps"],
        "decoded": summary["decoded_tokens"] / summary["steps"],
        "kept": summary["kept_tokens"] / summary["steps"],
        "kept_vs_true": summary["tail"]["kept_vs_true_len"],
        "before": summary["before"]["eval/sampled_accuracy"],
        "after": after["eval/sampled_accuracy"],
        "greedy": after["eval/greedy_accuracy"],
        "truncated_after": after["eval/sampled_clipped_ratio"],
        "mean_length_after": after["eval/sampled_mean_length"],
        "bubble": statistics.mean(s["bubble/total"] for s in steps),
        "last_quarter_step_s": statistics.mean(s["step_time"] for s in quarter),
    }


COLUMNS = {
    "step_s": "{:.3f}",
    "rollout_s": "{:.3f}",
    "cpu_s": "{:.3f}",
    "bubble": "{:.0%}",
    "decode_steps": "{:.0f}",
    "decoded": "{:.0f}",
    "kept": "{:.0f}",
    "kept_vs_true": "{:.2f}",
    "before": "{:.3f}",
    "after": "{:.3f}",
    "greedy": "{:.3f}",
    "truncated_after": "{:.2%}",
    "mean_length_after": "{:.0f}",
}


def show(rows: list[dict[str, Any]]) -> None:
    print("| arm | n | " + " | ".join(COLUMNS) + " |")
    print("|---|---|" + "---|" * len(COLUMNS))
    for arm in ARMS:
        mine = [row for row in rows if row["arm"] == arm]
        cells = []
        for name, form in COLUMNS.items():
            values = [row[name] for row in mine]
            text = form.format(statistics.mean(values))
            if name == "after" and len(values) > 1:
                text += f" ± {statistics.stdev(values):.3f}"
            cells.append(text)
        print(f"| {arm} | {len(mine)} | " + " | ".join(cells) + " |")
    seeds = sorted({row["seed"] for row in rows})
    for arm in ("exact, 2 workers", "race, 2 workers"):
        ratios = []
        for seed in seeds:
            of_seed = {row["arm"]: row for row in rows if row["seed"] == seed}
            best = min(row["step_s"] for name, row in of_seed.items() if name.startswith("off"))
            ratios.append(best / of_seed[arm]["step_s"])
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"\n{arm} against the best off of its seed: {listed} "
            f"(median {statistics.median(ratios):.2f}x)"
        )
    bound = statistics.median(
        min(r["step_s"] for r in rows if r["seed"] == s and r["arm"].startswith("off"))
        * 2
        / min(r["cpu_s"] for r in rows if r["seed"] == s and not r["arm"].startswith("race"))
        for s in seeds
    )
    print(f"\nperfect packing of the least work on two cores would be {bound:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=135)
    parser.add_argument("--out", type=Path, default=Path("runs/modes"))
    arguments = parser.parse_args()
    model = warm_start(default_cache())
    size = Size(steps=arguments.steps)
    rows = [
        run_arm(model, arguments.out, seed, arm, size)
        for seed in range(1, arguments.seeds + 1)
        for arm in ARMS
    ]
    show(rows)


if __name__ == "__main__":
    main()
