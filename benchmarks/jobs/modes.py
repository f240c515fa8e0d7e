"""Modes side by side on the demo's job: wall time a step, accuracy, bias, over several seeds.

    python -m benchmarks.jobs.modes --seeds 3 --steps 135 --out runs/modes

`off` runs in every thread setting that two cores allow, `exact` and `race` on two workers. Runs
alternate, so that drift of a shared machine hits all alike; ratios are of the runs of one seed.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks._run import flags, listed, made, metrics, summary, table
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
    if not made(folder):
        train(demo_config(model, folder, mode, size, {"seed": seed, "devices": devices}))
    found, steps = summary(folder), metrics(folder)
    each = found["steps"]
    return {
        "arm": arm,
        "seed": seed,
        "step_s": statistics.mean(s["step_time"] for s in steps),
        "cpu_s": found["timing_s"]["worker_cpu"] / each,
        "bubble": statistics.mean(s["bubble/total"] for s in steps),
        "decode_steps": found["decode_steps"] / each,
        "decoded": found["decoded_tokens"] / each,
        "kept_vs_true": found["tail"]["kept_vs_true_len"],
        "before": found["before"]["eval/sampled_accuracy"],
        "after": found["after"]["eval/sampled_accuracy"],
    }


COLUMNS = {
    "step_s": "{:.3f}",
    "cpu_s": "{:.3f}",
    "bubble": "{:.0%}",
    "decode_steps": "{:.0f}",
    "decoded": "{:.0f}",
    "kept_vs_true": "{:.2f}",
    "before": "{:.3f}",
    "after": "{:.3f}",
}


def show(rows: list[dict[str, Any]]) -> None:
    table(["arm", "n", *COLUMNS], (_cells(arm, rows) for arm in ARMS))
    seeds = sorted({row["seed"] for row in rows})
    for arm in ("exact, 2 workers", "race, 2 workers"):
        ratios = []
        for seed in seeds:
            of_seed = {row["arm"]: row for row in rows if row["seed"] == seed}
            best = min(row["step_s"] for name, row in of_seed.items() if name.startswith("off"))
            ratios.append(best / of_seed[arm]["step_s"])
        print(f"\n{arm} against the best off of its seed: {listed(ratios)}")
    bound = statistics.median(
        min(r["step_s"] for r in rows if r["seed"] == s and r["arm"].startswith("off"))
        * 2
        / min(r["cpu_s"] for r in rows if r["seed"] == s and not r["arm"].startswith("race"))
        for s in seeds
    )
    print(f"\nperfect packing of the least work on two cores would be {bound:.2f}x")


def _cells(arm: str, rows: list[dict[str, Any]]) -> list[Any]:
    mine = [row for row in rows if row["arm"] == arm]
    cells: list[Any] = [arm, len(mine)]
    for name, form in COLUMNS.items():
        values = [row[name] for row in mine]
        spread = name == "after" and len(values) > 1
        cells.append(form.format(statistics.mean(values)))
        cells[-1] += f" ± {statistics.stdev(values):.3f}" if spread else ""
    return cells


def main() -> None:
    arguments = flags(__doc__, seeds=3, steps=135, out=Path("runs/modes")).parse_args()
    model, size = warm_start(default_cache()), Size(steps=arguments.steps)
    seeds = range(1, arguments.seeds + 1)
    show([run_arm(model, arguments.out, seed, arm, size) for seed in seeds for arm in ARMS])


if __name__ == "__main__":
    main()
