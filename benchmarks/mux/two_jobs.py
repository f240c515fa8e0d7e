"""Two real training jobs on a rollout pool and a training pool of one CPU core each.

    python -m benchmarks.mux.two_jobs --steps 6

Each job runs alone first (rollouts on core 0, training on core 1), then both run at once under
permits of the same daemon. Prints the time of the steps, and whether every job's weights are bit
for bit those of its run alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks._run import COMMAND, daemon, flags, summary, write_lines

SETTINGS = '{"lifetime": false, "repack": false}'
TIMEOUT_S = 500


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


def write_job(folder: Path, name: str, seed: int, steps: int, mux: dict[str, Any]) -> Path:
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
            "max_completion_length": 48,
            "tail_batching": {"mode": "off"},
        },
        "train": {"learning_rate": 1e-4},
        "engine": {"kind": "mini", "max_running": 2},
        "devices": {"per_node": 1, "pin": False, "kind": "cpu"},
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
    rows = ({"id": f"p{i}", "prompt": f"{i:03d}", "answer": "1"} for i in range(64))
    write_lines(folder / "rows.jsonl", rows)
    judge = (
        "def ones(completions, **_):\n    return [text.count('1') / 4 for text in completions]\n"
    )
    (folder / "judge.py").write_text(judge)
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_urlsafe(32))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(config: Path) -> subprocess.Popen[str]:
    words = [*COMMAND, "train", str(config)]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, text=True, start_new_session=True)


def digest(run: Path) -> str:
    found = hashlib.blake2b()
    for path in sorted(run.glob("checkpoint-*/**/*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def span(timeline: Sequence[Mapping[str, Any]]) -> float:
    """Seconds from the beginning of the first phase to the end of the last."""
    return max(phase["end"] for phase in timeline) - min(phase["start"] for phase in timeline)


def guards(jobs: list[subprocess.Popen[str]]) -> int:
    """How many of the jobs have built everything and ask for their daemon by now."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        found += "runtime/ipc/watchdog.py" in command and parent in {job.pid for job in jobs}
    return found


def run_arm(
    folder: Path, port: int, jobs: list[subprocess.Popen[str]]
) -> Sequence[Mapping[str, Any]]:
    """Let jobs that wait for the daemon of ``port`` go; the timeline of their phases."""
    from rollpacker.rollmux.service.client.client import MuxClient

    words = ["--state", f"{folder}/mux-{port}", "--port", str(port), "--ttl", "20"]
    words += ["--token-file", f"{folder}/token", "--settings", SETTINGS]
    with daemon(*words) as url:
        for job in jobs:
            if job.wait(timeout=TIMEOUT_S):
                raise RuntimeError(f"a job failed: exit code {job.returncode}")
        return MuxClient(url, folder / "token").timeline(3600.0)


def measure(folder: Path, steps: int) -> dict[str, Any]:
    """Both arms; times in seconds.

    All jobs are built first and then wait for the daemon of their arm, so that only steps are
    measured.
    """
    prepare(folder)
    arms = {"alone-1": [1], "alone-2": [2], "shared": [1, 2]}
    ports = {name: free_port() for name in arms}
    jobs: dict[str, list[subprocess.Popen[str]]] = {name: [] for name in arms}
    try:
        for name, seeds in arms.items():
            for seed in seeds:
                mux = {
                    "url": f"http://127.0.0.1:{ports[name]}",
                    "token_file": str(folder / "token"),
                    "job": f"{name}-{seed}",
                    "slo": 4.0,
                    "worst_rollout_s": 5.0,
                    "worst_train_s": 5.0,
                    "cores": {"rollout": [0], "train": [1]},
                }
                config = write_job(folder, f"{name}-{seed}", seed, steps, mux)
                jobs[name].append(start(config))
        everyone = [job for each in jobs.values() for job in each]
        until = time.monotonic() + TIMEOUT_S
        while guards(everyone) < len(everyone):
            if time.monotonic() > until or any(job.poll() for job in everyone):
                raise RuntimeError("a job could not be built; see above")
            time.sleep(0.2)
        timelines = {name: run_arm(folder, ports[name], jobs[name]) for name in arms}
    finally:
        for each in jobs.values():
            for job in each:
                if job.poll() is None:
                    os.killpg(job.pid, signal.SIGKILL)
                    job.wait()
    return result(folder, timelines)


def result(folder: Path, timelines: dict[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """What the timelines and the runs' folders say."""
    spans = {name: span(timeline) for name, timeline in timelines.items()}
    alone = [spans["alone-1"], spans["alone-2"]]
    pairs = [(f"alone-{seed}-{seed}", f"shared-{seed}") for seed in (1, 2)]
    nodes = {node for phase in timelines["shared"] for node in phase["nodes"]}
    runs = [name for pair in pairs for name in pair]
    summaries = {name: summary(folder / name) for name in runs}
    return {
        "steps_alone_s": alone,
        "steps_shared_s": spans["shared"],
        "steps_ratio": spans["shared"] / sum(alone),
        "shared_nodes": sorted(nodes),
        "identical": [digest(folder / one) == digest(folder / two) for one, two in pairs],
        "phase_s": {k: v for each in timelines.values() for k, v in phase_means(each).items()},
        "worker_cpu_s": {name: s["timing_s"]["worker_cpu"] for name, s in summaries.items()},
        "mux": {name: s["mux"] for name, s in summaries.items()},
    }


def phase_means(timeline: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean seconds of a phase by job and kind."""
    spans: dict[str, list[float]] = {}
    for phase in timeline:
        spans.setdefault(f"{phase['job']} {phase['phase']}", []).append(
            phase["end"] - phase["start"]
        )
    return {name: sum(values) / len(values) for name, values in sorted(spans.items())}


def main() -> None:
    args = flags(__doc__, steps=6, json=False).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.steps)
    if args.json:
        print(json.dumps(found))
        return
    alone = " + ".join(f"{seconds:.1f}" for seconds in found["steps_alone_s"])
    print(f"steps: alone {alone} s, together {found['steps_shared_s']:.1f} s", end="")
    print(f": {found['steps_ratio']:.2f} of one after the other")
    print(f"nodes shared: {found['shared_nodes']}; identical weights: {found['identical']}")
    for name, seconds in found["phase_s"].items():
        print(f"  {name:>16}: {seconds:.2f} s a phase")
    for name, stats in found["mux"].items():
        print(f"  {name:>16}: {stats}")


if __name__ == "__main__":
    main()
