"""What ``eval``, ``checkpoint``, ``mux`` and ``trackers`` do."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import polars as pl
from matrix_runs import Ran, by_command
from matrix_table import described, effect
from mux_real_daemon import Daemon
from rich.console import Console

from rollpacker import job
from rollpacker.cli import shared_phases
from rollpacker.config import RunConfig
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.client.client import MuxClient
from rollpacker.runtime.record.progress import Progress

# --- evaluation and checkpoints, in run ``tuned`` of effects_train -------------------------------


def examined(ran: Ran) -> list[dict[str, Any]]:
    """Calls of the evaluation before the first step: six problems, two samples, one greedy."""
    return ran.calls[: 6 * (2 + 1)]


def examined_scores(ran: Ran) -> pl.Series:
    return pl.Series([call["scores"][0] for call in examined(ran)])


@effect("eval.fraction", run="split", instead={"eval.data.path": "{here}/held_out.jsonl"})
def _(ran: Ran) -> None:
    """What is measured by is not trained on, and there is no other."""
    assert "rows held out (eval.fraction)" in ran.said
    count = int(ran.summary["before"]["eval/problems"])
    assert 1 <= count <= 6
    evaluated = {call["prompts"][0] for call in ran.calls[:count]}
    assert len(evaluated) == count
    trained = {f"{int(prompt[1:]):03d}" for prompt in ran.table["prompt"]}
    assert evaluated.isdisjoint(trained)


for number in ("HUP", "USR1", "USR2"):
    described(
        f"told-{number}",
        {
            "checkpoint.signals": [number],
            "checkpoint.grace_s": 200.0,
            "rewards.0.options": {"sends": f"SIG{number}"},
        },
        slow=True,
        train=by_command,
    )

    @effect(f"checkpoint.signals={number}", run=f"told-{number}")
    def _(ran: Ran, number: str = number) -> None:
        """The step in flight is finished, and there is a checkpoint of it."""
        assert f"stopped by SIG{number}: checkpoint-1" in ran.said
        assert ran.said.endswith(f"exit {128 + getattr(signal, f'SIG{number}')}")
        assert ran.state(1)["counters"]["step"] == 1


STOPPED = {"rewards.0.options": {"sends": "SIGTERM", "after_s": 8.0}, "rewards.0.timeout_s": 100.0}
described("hurried", STOPPED | {"checkpoint.grace_s": 4.0}, slow=True, train=by_command)


# --- samples -------------------------------------------------------------------------------------


# --- nodes shared through a daemon ---------------------------------------------------------------


class SecureDaemon(Daemon):
    """A daemon behind TLS, with a certificate of its own."""

    def start(self) -> None:
        certificate, key = self.folder / "cert.pem", self.folder / "key.pem"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        paths = ["-keyout", str(key), "-out", str(certificate)]
        subprocess.run([*words, *paths], capture_output=True, check=True)
        self._first += ("--tls-cert", str(certificate), "--tls-key", str(key))
        super().start()


@contextlib.contextmanager
def daemon(here: Path) -> Iterator[dict[str, Any]]:
    """A daemon while the run is made; what it knew of the job at the end."""
    folder = here / f"daemon-{len(list(here.glob('daemon-*')))}"
    folder.mkdir()
    running = SecureDaemon(folder, ttl=20.0)
    url = f"https://127.0.0.1:{running.port}"
    certificate = str(folder / "cert.pem")
    found = {"url": url, "token_file": str(running.token_file), "cafile": certificate}
    try:
        yield found
        client = MuxClient(url, running.token_file, cafile=certificate)
        found["jobs"] = client.status()["ended"]
    finally:
        running.stop()


def with_permits(chosen: RunConfig) -> tuple[Path, str]:
    """As ``rollpacker train`` does it."""
    said = StringIO()
    progress = Progress(Console(file=said, width=400))
    return job.train(chosen, progress=progress, phases=shared_phases(chosen)), said.getvalue()


described(
    "shared-nodes",
    {
        "mux.url": "{url}",
        "mux.token_file": "{token_file}",
        "mux.cafile": "{cafile}",
        "mux.job": "night-shift",
        "mux.slo": 7.0,
        "mux.worst_rollout_s": 31.0,
        "mux.worst_train_s": 17.0,
        "mux.team": "math",
        "mux.priority": 3,
        "mux.rollout_memory_gb": 11.0,
        "mux.train_memory_gb": 13.0,
        "mux.cores": {"rollout": [0], "train": [1]},
        "rewards.0.options": {"probe": True},
        "steps": 2,
    },
    slow=True,
    around=daemon,
    train=with_permits,
)


@contextlib.contextmanager
def submitted(here: Path) -> Iterator[dict[str, Any]]:
    """A daemon that knows the run's job before it starts; what it knows at the end."""
    folder = here / f"managed-{len(list(here.glob('managed-*')))}"
    folder.mkdir()
    running = Daemon(folder, ttl=20.0)
    running.client().submit(JobSpec(id="told", worst_rollout_s=30.0, worst_train_s=30.0))
    found: dict[str, Any] = {"url": running.url, "token_file": str(running.token_file)}
    try:
        yield found
        found["jobs"] = running.client().status()["jobs"]
    finally:
        running.stop()


described(
    "managed",
    {
        "mux.url": "{url}",
        "mux.token_file": "{token_file}",
        "mux.job": "told",
        "mux.worst_rollout_s": 31.0,
        "mux.worst_train_s": 17.0,
        "mux.managed": True,
        "steps": 2,
    },
    slow=True,
    around=submitted,
    train=with_permits,
)


def known(ran: Ran) -> dict[str, Any]:
    """What the daemon knew of the job."""
    jobs = ran.extra.get("jobs", [])
    assert len(jobs) == 1
    return jobs[0]


# --- trackers: what packages of these names are told ---------------------------------------------

STAND_IN = """
import json, pathlib

def note(kind, *values):
    with open(pathlib.Path(__file__).with_suffix(".log"), "a") as file:
        file.write(json.dumps([kind, *values], default=str) + "\\n")

def init(config, **options):
    note("init", options)
    note("config", config)
def log(values, step=None):
    note("log", step, values)
def finish():
    note("finish")

def set_experiment(name):
    assert name == "rollpacker"
def start_run(**options):
    note("init", options)
def log_params(values):
    note("config", {k: json.loads(v) if v.isdigit() else v for k, v in values.items()})
def log_metrics(values, step=None):
    note("log", step, values)
def end_run():
    note("finish")
"""
"""Of wandb and trackio, then of mlflow, into a file. None of the packages is installed for tests:
they want an account, a server or a database."""

TRACKERS = ("wandb", "trackio", "mlflow")


@contextlib.contextmanager
def packages(here: Path) -> Iterator[dict[str, Any]]:
    """Stand-ins that can be imported."""
    folder = here / f"packages-{len(list(here.glob('packages-*')))}"
    folder.mkdir()
    for name in TRACKERS:
        (folder / f"{name}.py").write_text(STAND_IN, encoding="utf-8")
    sys.path.insert(0, str(folder))
    try:
        yield {"packages": folder}
    finally:
        sys.path.remove(str(folder))
        for name in TRACKERS:
            sys.modules.pop(name, None)


for tracker in TRACKERS:
    described(tracker, {"trackers": [tracker], "steps": 2}, slow=True, around=packages)

    @effect(f"trackers={tracker}", run=tracker)
    def _(ran: Ran, tracker: str = tracker) -> None:
        """It is told the settings and the numbers of every step, and that the run is over."""
        log = ran.extra.get("packages", ran.here) / f"{tracker}.log"
        assert log.exists()
        told = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        kinds = [kind for kind, *_ in told]
        assert (kinds[0], kinds[-1]) == ("init", "finish")
        assert ran.described.name in json.dumps(told[0])
        settings = {k: v for kind, *rest in told if kind == "config" for k, v in rest[0].items()}
        assert settings["rollout.num_generations"] == 3
        steps = [rest for kind, *rest in told if kind == "log"]
        assert [step for step, _ in steps] == [0, 1]
        assert [v["reward"] for _, v in steps] == [row["reward"] for row in ran.metrics]
