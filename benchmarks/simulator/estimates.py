"""Whether measured speed-ups lie in the ranges that `rollpacker estimate` gives for them.

    python -m benchmarks.simulator.estimates --out runs/estimates

The demo's job over seeds, and the paper's three models on emulated devices. Each range is estimated
from the job's own run of mode `off`. Runs that are there already are not repeated.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._run import COMMAND, flags, made, metrics, summary, table
from rollpacker.demo.run import DEMO, demo_config
from rollpacker.demo.warm_start import default_cache, warm_start
from rollpacker.emulate.paper_job import Paper, paper_job
from rollpacker.job import train
from rollpacker.runtime.record.progress import Progress

MODES = ("exact", "race")
SETTINGS = {
    "7B": ("paper-7b-8k", "paper-8k", 16, 12.0),
    "14B": ("paper-14b-16k", "paper-16k", 32, 12.0),
    "32B": ("paper-32b-32k", "paper-32k", 64, 12.0),
}
"""Calibration, lengths, devices, and emulated seconds in one of the clock's."""
RACED = 0.4
"""Of the factor: a raced rollout is so short that the driver could not keep up with the whole."""
STEPS = 11
QUIET = Progress(every=1000)


def demo_runs(out: Path, seed: int) -> Iterator[tuple[str, float]]:
    """Each mode's speed-up in the demo's job, by training wall time."""
    model = warm_start(default_cache())
    seconds = dict[str, float]()
    for mode in ("off", *MODES):
        folder = out / mode
        if not made(folder):
            train(demo_config(model, folder, mode, DEMO, {"seed": seed}), progress=QUIET)
        seconds[mode] = summary(folder)["timing_s"]["steps"]
        yield mode, seconds["off"] / seconds[mode]


def emulated_runs(out: Path, name: str) -> Iterator[tuple[str, float]]:
    """Each mode's speed-up in an emulated job, in its steps after the first."""
    calibration, workload, gpus, factor = SETTINGS[name]
    seconds = dict[str, float]()
    for mode in ("off", *MODES):
        paced = factor * (RACED if mode == "race" else 1.0)
        paper = Paper(
            calibration=calibration, workload=workload, gpus=gpus, factor=paced, steps=STEPS
        )
        if not made(out / mode):
            train(paper_job(paper, mode, out, {"grading": {"asynchronous": True}}), progress=QUIET)
        steady = [line["step_time"] for line in metrics(out / mode)[1:]]
        seconds[mode] = statistics.fmean(steady)
        if not summary(out / mode)["emulated"]["honest"]:
            print(f"{name} {mode}: not honest", flush=True)
        yield mode, seconds["off"] / seconds[mode]


def estimated(run: Path) -> dict[str, Any]:
    """The command's modes."""
    command = [*COMMAND, "estimate", "--from", str(run), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["modes"]


def main() -> None:
    arguments = flags(__doc__, out=Path("runs/estimates"), seeds=[1, 2]).parse_args()
    out: Path = arguments.out
    jobs = {f"demo, seed {n}": demo_runs(out / f"demo-{n}", n) for n in arguments.seeds}
    jobs |= {f"emulated {n}": emulated_runs(out / n, n) for n in SETTINGS}
    folders = [*(f"demo-{n}" for n in arguments.seeds), *SETTINGS]
    rows = list[tuple[str, ...]]()
    for (job, runs), folder in zip(jobs.items(), folders, strict=True):
        measured = dict(runs)
        modes = estimated(out / folder / "off")
        for mode in MODES:
            low, middle, high = (modes[mode][key] for key in ("low", "speedup", "high"))
            inside = "yes" if low <= measured[mode] <= high else "no"
            ranged = f"{low:.2f}x to {high:.2f}x"
            rows.append((job, mode, f"{measured[mode]:.2f}x", f"{middle:.2f}x", ranged, inside))
            print(*rows[-1], sep=" | ", flush=True)
    table(("job", "mode", "measured", "estimate", "range", "inside"), rows)


if __name__ == "__main__":
    main()
