"""Two workers on one GPU: a few GRPO steps in each mode, and one with CUDA MPS.

    python -m benchmarks.gpu.grpo --device cuda

Real `rollpacker train` runs of a random model whose responses end by chance, so lengths have a
tail. Each is ended after its last step: what a checkpoint costs is not measured here. On a CPU two
worker processes stand for the two on a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks._run import COMMAND, metrics, write_lines
from benchmarks.gpu.models import Section, write_checkpoint

MODES = ("off", "exact", "race")
STEPS = {"cuda": 6, "cpu": 2}
"""A run takes half a minute to start on a GPU, and four seconds a step."""
SHAPE = {"cuda": "0.5B", "cpu": "tiny"}
MEAN = {"cuda": 24, "cpu": 8}
"""Tokens of a response, most of which are shorter; the longest has four times as many."""
REWARD = """
def even(completion_ids, **_):
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]
"""


def prepare(folder: Path, device: str) -> None:
    """Model, prompts and reward."""
    write_checkpoint(folder / "model", SHAPE[device], device, mean_length=MEAN[device])
    rows = ({"id": str(i), "prompt": f"{i:04d}" * 16, "answer": ""} for i in range(512))
    write_lines(folder / "rows.jsonl", rows)
    (folder / "reward.py").write_text(REWARD)


def job(folder: Path, name: str, mode: str, workers: int, device: str) -> Path:
    """The run's configuration, as a file."""
    small = device == "cpu"
    tree = {
        "output": str(folder / name),
        "steps": STEPS[device] + 1,
        "model": {
            "path": str(folder / "model"),
            "dtype": "float32" if small else "bfloat16",
        },
        "data": {"path": str(folder / "rows.jsonl")},
        "rewards": [{"function": f"{folder / 'reward.py'}:even"}],
        "rollout": {
            "prompts_per_step": 2 if small else 8,
            "num_generations": 2 if small else 8,
            "max_completion_length": 4 * MEAN[device],
            "tail_batching": {"mode": mode},
        },
        "train": {"learning_rate": 1e-6},
        "devices": {"per_node": workers, "kind": device},
        "checkpoint": {"every": 0},
    }
    if not small:
        tree["devices"]["per_gpu"] = workers
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The finished steps of a run."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return metrics(folder)
    return []


def run(file: Path, folder: Path, steps: int, limit_s: float, extra: dict[str, str]) -> str:
    """Train until so many steps are done; what went wrong, or nothing."""
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        process = subprocess.Popen(
            [*COMMAND, "train", str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | extra,
        )
        deadline = time.monotonic() + limit_s
        try:
            while len(steps_of(folder)) < steps and process.poll() is None:
                if time.monotonic() > deadline:
                    return f"stopped after {len(steps_of(folder))} steps: time was over"
                time.sleep(0.1)
        finally:
            end(process)
        if len(steps_of(folder)) >= steps:
            return ""
        log.seek(0)
        return " ".join(log.read().split())[-400:]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the driver, which its workers notice and leave by themselves; then what is left.

    A GPU's client that is killed can take those beside it along, under MPS.
    """
    process.kill()
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        for _ in range(100):
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)


def summary(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the steps after the first, which compiles and allocates."""
    later = steps[1:] or steps
    names = {
        "step_s": "step_time",
        "rollout_s": "timing_s/rollout",
        "gradients_s": "timing_s/gradients",
        "apply_s": "timing_s/apply",
        "bubble": "bubble/total",
        "mean_length": "completions/mean_length",
    }
    found = {
        short: statistics.median(step[name] for step in later)
        for short, name in names.items()
        if all(name in step for step in later)
    }
    return {**found, "steps": float(len(steps))}


def arms(device: str) -> list[tuple[str, int, bool]]:
    """Mode, workers on the GPU, and whether MPS runs."""
    two = [(mode, 2, False) for mode in MODES]
    if device == "cpu":
        return two
    return [("off", 1, False), *two, ("exact", 2, True)]


@contextlib.contextmanager
def daemon(folder: Path | None) -> Iterator[dict[str, str]]:
    """CUDA MPS while it lasts, with a folder of its own; the variables of its clients."""
    if folder is None:
        yield {}
        return
    variables = {f"CUDA_MPS_{n.upper()}_DIRECTORY": str(folder / n) for n in ("pipe", "log")}

    def control(*flags: str, said: bytes = b"") -> None:
        command = ["nvidia-cuda-mps-control", *flags]
        quiet = subprocess.DEVNULL  # the daemon would hold a pipe open
        env = os.environ | variables
        subprocess.run(command, input=said, stdout=quiet, env=env, timeout=30, check=True)

    for place in variables.values():
        Path(place).mkdir(parents=True)
    control("-d")
    try:
        yield variables
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            control(said=b"quit\n")


def measure(section: Section, folder: Path, device: str) -> None:
    chosen = arms(device)
    for place, (mode, workers, shared) in enumerate(chosen):
        cells = {"mode": mode, "workers": workers, "mps": shared}
        # What is left is for this arm and the others alike, or the first would take it all.
        limit = section.left() / (len(chosen) - place)
        if limit <= 0:
            section.row(**cells, error="not reached: the section's time was over")
            continue
        name = f"{mode}-{workers}-{'mps' if shared else 'plain'}"
        file = job(folder, name, mode, workers, device)
        try:
            with daemon(folder / "mps" if shared else None) as extra:
                error = run(file, folder / name, STEPS[device], limit, extra)
        except (OSError, subprocess.SubprocessError) as problem:
            section.row(**cells, error=str(problem))
            continue
        done = steps_of(folder / name)
        cells |= summary(done) if done else {}
        section.row(**cells, **({"error": error} if error else {}))


def main() -> None:
    # Told to stop, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    section = Section(__doc__)
    device = section.parse().device
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), device)
        measure(section, Path(folder), device)


if __name__ == "__main__":
    main()
