"""Two real training jobs on a rollout pool and a training pool of one CPU core each.

    python benchmarks/mux_two_jobs.py --steps 6

Each job runs alone first (rollouts on core 0, training on core 1), then both run at once under
permits of the same daemon. Prints the time of the steps, of whole processes, and whether every
job's weights are bit for bit those of its run alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

COMMAND = (sys.executable, "-c", "from rollpacker.cli import main; main()")
SETTINGS = '{"permits": "round_robin", "lifetime": false, "learn": false, "repack": false}'
TIMEOUT_S = 500


@contextmanager
def daemon(folder: Path, ttl: float = 20.0) -> Iterator[tuple[str, Path]]:
    """A daemon's address and token file."""
    words = ["mux", "serve", "--state", str(folder), "--port", "0", "--ttl", str(ttl)]
    process = subprocess.Popen(
        [*COMMAND, *words, "--settings", SETTINGS], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        yield said[2].rstrip(","), Path(said[-1])
    finally:
        process.terminate()
        process.wait()


def write_model(folder: Path, seed: int) -> None:
    """A random Qwen2 over the demo's words."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rollpacker.demo.model import build_tokenizer

    tokenizer: Any = build_tokenizer()
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_job(
    folder: Path, name: str, seed: int, steps: int, length: int, mux: dict[str, Any]
) -> Path:
    """A job's configuration file; its run's folder is ``folder/name``."""
    tree = {
        "seed": seed,
        "output": str(folder / name),
        "steps": steps,
        "epochs": 100,
        "deterministic": True,
        "model": {"path": str(folder / f"model-{seed}")},
        "data": {"path": str(folder / "rows.jsonl")},
        "rewards": [{"function": f"{folder / 'judge.py'}:ones"}],
        "rollout": {
            "prompts_per_step": 8,
            "num_generations": 8,
            "max_completion_length": length,
            "tail_batching": {"mode": "off"},
        },
        "train": {"learning_rate": 1e-4},
        "engine": {"kind": "mini", "max_running": 2},
        "workers": {"count": 1, "pin": False, "device": "cpu"},
        "checkpoint": {"every": 0},
        "mux": mux,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return path


def prepare(folder: Path) -> None:
    """Models, prompts and the reward of both jobs."""
    for seed in (1, 2):
        write_model(folder / f"model-{seed}", seed)
    rows = [{"id": f"p{i}", "prompt": f"{i:03d}", "answer": "1"} for i in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    judge = "def ones(completions, **_):\n    return [text.count('1') / 4 for text in completions]\n"
    (folder / "judge.py").write_text(judge)


def start(config: Path) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*COMMAND, "train", str(config)], stdout=subprocess.DEVNULL, text=True, env=env
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.wait(timeout=TIMEOUT_S):
            raise RuntimeError(f"a job failed: exit code {process.returncode}")


def digest(run: Path) -> str:
    found = hashlib.blake2b()
    for path in sorted(run.glob("checkpoint-*/**/*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def steps_span(timeline: list[dict[str, Any]], jobs: set[str]) -> float:
    """Seconds from the first phase of any of the jobs to the end of the last."""
    mine = [phase for phase in timeline if phase["job"] in jobs]
    return max(phase["end"] for phase in mine) - min(phase["start"] for phase in mine)


def measure(folder: Path, steps: int, length: int) -> dict[str, Any]:
    """Both arms; times in seconds."""
    from rollpacker.rollmux.service.client import MuxClient

    prepare(folder)
    with daemon(folder / "mux") as (url, token):
        mux = {
            "url": url,
            "token_file": str(token),
            "slo": 4.0,
            "worst_rollout_s": 5.0,
            "worst_train_s": 5.0,
            "cores": {"rollout": [0], "train": [1]},
        }
        names = {seed: (f"alone-{seed}", f"shared-{seed}") for seed in (1, 2)}
        whole = {"alone": 0.0}
        for seed, (alone, _) in names.items():
            begun = time.monotonic()
            finish([start(write_job(folder, alone, seed, steps, length, mux | {"job": alone}))])
            whole["alone"] += time.monotonic() - begun
        begun = time.monotonic()
        together = [
            start(write_job(folder, shared, seed, steps, length, mux | {"job": shared}))
            for seed, (_, shared) in names.items()
        ]
        finish(together)
        whole["shared"] = time.monotonic() - begun
        client = MuxClient(url, token)
        timeline = client.timeline(3600.0)
    alone_s = [steps_span(timeline, {alone}) for alone, _ in names.values()]
    shared_s = steps_span(timeline, {shared for _, shared in names.values()})
    same = [digest(folder / alone) == digest(folder / shared) for alone, shared in names.values()]
    summaries = {
        name: json.loads((folder / name / "summary.json").read_text())
        for pair in names.values()
        for name in pair
    }
    return {
        "steps_alone_s": alone_s,
        "steps_shared_s": shared_s,
        "steps_ratio": shared_s / sum(alone_s),
        "whole_s": whole,
        "whole_ratio": whole["shared"] / whole["alone"],
        "identical": same,
        "phase_s": phase_means(timeline),
        "mux": {name: summary["mux"] for name, summary in summaries.items()},
    }


def phase_means(timeline: list[dict[str, Any]]) -> dict[str, float]:
    """Mean seconds of a phase by job and kind."""
    spans: dict[str, list[float]] = {}
    for phase in timeline:
        spans.setdefault(f"{phase['job']} {phase['phase']}", []).append(
            phase["end"] - phase["start"]
        )
    return {name: sum(values) / len(values) for name, values in sorted(spans.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description="Two jobs, two cores, one daemon.")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args.steps, args.length)
    if args.json:
        print(json.dumps(result))
        return
    alone = " + ".join(f"{seconds:.1f}" for seconds in result["steps_alone_s"])
    print(f"steps: alone {alone} s, together {result['steps_shared_s']:.1f} s", end="")
    print(f": {result['steps_ratio']:.2f} of one after the other")
    print(f"whole processes: {result['whole_ratio']:.2f}; identical weights: {result['identical']}")
    for name, seconds in result["phase_s"].items():
        print(f"  {name:>16}: {seconds:.2f} s a phase")
    for name, stats in result["mux"].items():
        print(f"  {name:>16}: {stats}")


if __name__ == "__main__":
    main()
