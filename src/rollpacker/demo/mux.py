"""RollMux on one machine: a daemon, agents of two nodes, and two jobs that take turns on them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollpacker.rollmux.service.client.client import MuxClient

JOBS = ("ada", "bob")
_NODES = {"roll-0": "rollout", "train-0": "train"}
_SHARE_AT_ONCE = {"lifetime": False, "repack": False}
"""Settings with which jobs share nodes even if they are short."""
_LOOK_S = 0.5
_MOST_S = 900.0
_STOP_S = 20.0
_COMMAND = (sys.executable, "-m", "rollpacker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running daemon, and the file of its operator's token."""

    url: str
    token: Path

    @property
    def page(self) -> str:
        """Address of the dashboard. Browsers do not send the part with the token."""
        return f"{self.url}/#token={self.token.read_text(encoding='utf-8').strip()}"

    @property
    def client(self) -> MuxClient:
        return MuxClient(self.url, self.token)


@contextlib.contextmanager
def service(out: Path) -> Iterator[Service]:
    """Run a daemon with two named nodes and their agents, below ``out``. All end with the block."""
    out.mkdir(parents=True, exist_ok=True)
    nodes = [
        {"name": name, "pool": pool, "memory_gb": 4, "devices": 1} for name, pool in _NODES.items()
    ]
    (out / "nodes.yaml").write_text(yaml.safe_dump({"nodes": nodes}), encoding="utf-8")
    started: list[subprocess.Popen[Any]] = []
    with contextlib.ExitStack() as stack:
        logs = stack.enter_context((out / "service.log").open("w", encoding="utf-8"))
        stack.callback(_stop, started)
        words = ["serve", "--state", str(out / "daemon"), "--port", "0"]
        words += ["--inventory", str(out / "nodes.yaml"), "--settings", json.dumps(_SHARE_AT_ONCE)]
        daemon = subprocess.Popen(
            [*_COMMAND, "mux", *words], stdout=subprocess.PIPE, stderr=logs, text=True
        )
        started.append(daemon)
        assert daemon.stdout is not None
        said = daemon.stdout.readline()
        if not said.startswith("listening"):
            raise RuntimeError(f"the daemon did not start: see {out / 'service.log'}")
        here = Service(url=said.split()[2].rstrip(","), token=out / "daemon" / "token")
        for name in _NODES:
            words = ["agent", "--node", name, "--url", here.url, "--token-file", str(here.token)]
            words += ["--devices", "1", "--programs", str(out / name)]
            agent = subprocess.Popen([*_COMMAND, "mux", *words], stdout=logs, stderr=logs)
            started.append(agent)
        yield here


def _stop(started: Sequence[subprocess.Popen[Any]]) -> None:
    """Stop the agents before the daemon that they report to."""
    for process in reversed(started):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        process.kill()


def write_jobs(out: Path, steps: int, model: Path) -> list[Path]:
    """Write the two jobs' configurations: the demo's problems, each with its own seed. Rollouts
    run on this process's first core, training on its last. Their model is ``out/model``."""
    cores = sorted(os.sched_getaffinity(0))
    (out / "model").symlink_to(model.resolve())
    return [_write_job(out, name, seed, steps, cores) for seed, name in enumerate(JOBS)]


def _write_job(out: Path, name: str, seed: int, steps: int, cores: Sequence[int]) -> Path:
    rows = "rollpacker.demo.task:train_rows"
    tree = {
        "seed": seed,
        "output": str((out / name).resolve()),
        "steps": steps,
        "model": {"path": str((out / "model").absolute())},
        "data": {"path": rows, "options": {"size": 16 * steps, "seed": seed}},
        "rewards": [{"function": "rg", "options": {"require_think_end": True}}],
        "rollout": {
            "prompts_per_step": 16,
            "num_generations": 8,
            "max_completion_length": 600,
            "tail_batching": {"mode": "off"},
        },
        "train": {"learning_rate": 3e-4, "warmup_steps": 5},
        "devices": {"per_node": 1, "kind": "cpu"},
        "checkpoint": {"every": 0},
        "mux": {
            "job": name,
            "slo": 4.0,
            "worst_rollout_s": 30.0,
            "worst_train_s": 30.0,
            "rollout_memory_gb": 1.0,
            "train_memory_gb": 1.0,
            "cores": {"rollout": [cores[0]], "train": [cores[-1]]},
        },
    }
    path = out / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path


def run_jobs(here: Service, jobs: Sequence[Path], say: Callable[[str], None]) -> dict[str, Any]:
    """Submit the jobs, wait until they end, and return measurements of the jobs and the nodes.
    Raises ``RuntimeError`` if a job fails or takes too long."""
    for path in jobs:
        words = ["submit", str(path), "--url", here.url, "--token-file", str(here.token)]
        done = subprocess.run(
            [*_COMMAND, "mux", *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr.strip().removeprefix("error: "))
        say(done.stdout.splitlines()[0])  # the other line tells how to wait for its end
    until = time.monotonic() + _MOST_S
    told: dict[str, int] = {}
    while True:
        found = here.client.status()
        live = {job["id"]: job["done"] for job in found["jobs"]}
        if live != told and live:
            told = live
            say(", ".join(f"{name}: {done} steps" for name, done in live.items()))
        ended = {job["id"]: job for job in found["ended"]}
        if set(JOBS) <= set(ended):
            return _outcome(here, ended)
        if time.monotonic() > until:
            raise RuntimeError(f"the jobs took more than {_MOST_S:.0f} s: {here.page}")
        time.sleep(_LOOK_S)


def _outcome(here: Service, ended: Mapping[str, Any]) -> dict[str, Any]:
    for name in JOBS:
        if code := ended[name]["program"]["attempts"][-1]["code"]:
            raise RuntimeError(
                f"job {name} failed with exit code {code}: its output is in a node's folder in "
                f"{here.token.parents[1]}"
            )
    runs = [(run, run["end"] - run["start"]) for run in _over(here.client.timeline(_MOST_S))]

    def spent(**of: str) -> float:
        return sum(seconds for run, seconds in runs if all(run[k] == v for k, v in of.items()))

    together = max(run["end"] for run, _ in runs) - min(run["start"] for run, _ in runs)
    jobs = {
        name: {
            "iterations": ended[name]["done"],
            "rollout_s": spent(job=name, phase="rollout"),
            "train_s": spent(job=name, phase="train"),
        }
        for name in JOBS
    }
    return {
        "jobs": jobs,
        "busy": {pool: spent(phase=pool) / together for pool in _NODES.values()},
        "together_s": together,
        "one_after_other_s": spent(),
    }


def _over(runs: Sequence[Any]) -> list[dict[str, Any]]:
    return [run for run in runs if run["end"] is not None]
