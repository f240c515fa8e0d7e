"""What Slurm, Kubernetes and impatient users send: a run ends in time and goes on as if it had not.

Signals come at events of the run (a reward, a phase, a line of the view), never after a while.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from runtime_jobs import (
    Workshop,
    checkpoints,
    cli_here,
    kept_samples,
    kill_group,
    metrics,
    start_cli,
    weights_digest,
)

from rollpacker import job
from rollpacker.config import RunConfig
from rollpacker.core import journal
from rollpacker.core.types import Phase
from rollpacker.job import Stopped
from rollpacker.job.run import stopping
from rollpacker.policy.rollout import from_journal
from rollpacker.runtime.record.metrics import Metrics
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.phase_nodes import OwnNodes, WaitStoppedError

REWARDS = '''
import os, pathlib, signal, time

def parent(pid):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])

def family(pid):
    """A process and all that come from it."""
    found = [pid]
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            child = parent(folder.name) == pid
        except OSError:
            continue
        if child:
            found += family(int(folder.name))
    return found

def send(everyone, number):
    # Grading processes are forked off a child of it.
    driver = parent(os.getppid())
    # The driver last: it must not have time to end the others first.
    for pid in reversed(family(driver)) if everyone else [driver]:
        os.kill(pid, getattr(signal, number))

def ones(completions, prompts, at, marker, everyone=False, hangs=False, number="SIGTERM"):
    if int(prompts[0]) == at and not os.path.exists(marker):
        open(marker, "w").close()
        send(everyone, number)
        while hangs:
            time.sleep(1)
    return [text.count("1") / 4 for text in completions]
'''

ON_LOADING = """
import os, pathlib, signal
stat = pathlib.Path(f"/proc/{os.getppid()}/stat").read_text()
os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGTERM)
"""
FIXED: dict[str, Any] = {"deterministic": True, "devices__per_node": 1, "epochs": 1}


class Bench:
    """A workshop, an undisturbed run of it, and runs that are stopped."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.shop = Workshop(folder, rows=11)
        self.judges = folder / "plug.py"
        self.judges.write_text(REWARDS, encoding="utf-8")
        self.changes = {**FIXED, **changes}
        marker = folder / "whole-marker"
        marker.touch()
        self.whole = job.train(self.config("whole"), progress=quiet())

    def tree(self, name: str, **options: Any) -> dict[str, Any]:
        options = {"at": 5, "marker": str(self.shop.folder / f"{name}-marker")} | options
        rewards = [{"function": f"{self.judges}:ones", "options": options, "timeout_s": 300}]
        return {"rewards": rewards, **self.changes}

    def config(self, name: str, options: Any = None, **changes: Any) -> RunConfig:
        return self.shop.config(name, "exact", **{**self.tree(name, **(options or {})), **changes})

    def assert_goes_on(self, name: str, options: Any = None, **changes: Any) -> Path:
        """Resumed, it ends with the bytes of the undisturbed run."""
        config = self.config(name, options, **changes)
        folder = job.train(config, resume=True, progress=quiet())
        last = f"checkpoint-{checkpoints(self.whole)[-1]}"
        assert weights_digest(folder / last) == weights_digest(self.whole / last)
        assert kept_samples(folder) == kept_samples(self.whole)
        losses = [[row["loss"] for row in metrics(f)] for f in (folder, self.whole)]
        assert losses[0] == losses[1]
        assert journal.replay(folder / "journal.jsonl", from_journal).differences == []
        return folder


def quiet() -> Progress:
    return Progress(Console(file=StringIO()))


def stopped(config: RunConfig, **options: Any) -> tuple[int, str]:
    """Train until a signal ends it; the exit code and what was said."""
    said = StringIO()
    progress = options.pop("progress", Progress)(Console(file=said, width=400))
    with pytest.raises(Stopped) as stop:
        job.train(config, progress=progress, **options)
    return int(str(stop.value.code)), said.getvalue()


def me(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("signals"))


def test_while_a_reward_is_loaded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shop = Workshop(tmp_path)
    shop.rewards.write_text(ON_LOADING + shop.rewards.read_text(), encoding="utf-8")
    done = cli_here("train", shop.file("run"), "--json")
    assert done.returncode == 143, done.stderr
    assert "stopped by SIGTERM: no work is lost" in done.stderr
    assert "Traceback" not in done.stderr + capfd.readouterr().err
    assert done.stdout.strip() == "{}"


@pytest.fixture
def nearly_all_for_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the grace time: what does not fit is dropped soon, and a checkpoint may take long."""
    monkeypatch.setattr(stopping, "_SHARE", 0.95)


@pytest.mark.wide
@pytest.mark.usefixtures("nearly_all_for_the_checkpoint")
def test_a_step_that_does_not_fit_is_dropped(bench: Bench) -> None:
    """To every process: workers and grading processes take no notice."""
    options = {"everyone": True, "hangs": True}
    changes = {"checkpoint": {"every": 0, "grace_s": 20}}
    code, said = stopped(bench.config("dropped", options, **changes))
    folder = bench.shop.folder / "dropped"
    assert code == 143
    step = checkpoints(folder)[0]
    assert f"step {step} is dropped before its end" in said
    assert f"checkpoint-{step} holds all {step} steps. Continue with --resume auto." in said
    bench.assert_goes_on("dropped", options, **changes)


@pytest.mark.parametrize(("slowest_s", "hurries_at"), [(1.0, 58.0), (30.0, 38.0)])
def test_a_slow_checkpoint_is_given_more_of_the_grace_time(
    monkeypatch: pytest.MonkeyPatch, slowest_s: float, hurries_at: float
) -> None:
    later = list[float]()
    loop: Any = SimpleNamespace(call_later=lambda seconds, _act: later.append(seconds))
    monkeypatch.setattr(stopping.asyncio, "get_running_loop", lambda: loop)
    fake: Any = SimpleNamespace(taken=signal.SIGTERM, age=lambda: 2.0, slowest_s=slowest_s)
    fake.log, fake.interrupt = SimpleNamespace(progress=quiet()), lambda: None
    stopping.Stopping(100.0, fake, fake, fake, fake, lambda: 3, fake)._stop()
    assert later == [hurries_at, 98.0]


@pytest.mark.slow
@pytest.mark.parametrize("everyone", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_a_step_that_fits_is_finished(
    tmp_path: Path, everyone: bool, workers: int, number: str, code: int
) -> None:
    bench = Bench(tmp_path, devices__per_node=workers)
    options = {"everyone": everyone, "number": number}
    changes = {"checkpoint": {"every": 0, "signals": ["USR1"], "grace_s": 100}}
    got, said = stopped(bench.config("run", options, **changes))
    assert got == code
    assert f"stopped by {number}: checkpoint-" in said
    assert "dropped" not in said
    bench.assert_goes_on("run", options, **changes)


class Told(OwnNodes):
    """A signal when a phase begins or ends, for the time that is given."""

    def __init__(self, when: str, count: int) -> None:
        super().__init__()
        self.when, self.left = when, count

    def happen(self, what: str) -> None:
        self.left -= what == self.when
        if what == self.when and self.left == 0:
            me()

    async def begin(self, phase: Phase) -> None:
        self.happen(phase)

    async def end(self) -> None:
        self.happen("end")


class Waiting(OwnNodes):
    """The nodes of a later phase do not come, until the user gives up."""

    def __init__(self, phase: Phase, patience: int) -> None:
        super().__init__()
        self.phase, self.patience, self.interrupts, self.asked = phase, patience, 0, 0

    def interrupt(self) -> None:
        self.interrupts += 1

    async def begin(self, phase: Phase) -> None:
        import asyncio

        self.asked += phase == self.phase
        if phase == self.phase and self.asked > 1:
            if not self.interrupts:
                me()
            while self.interrupts < self.patience:
                await asyncio.sleep(0.01)
            raise WaitStoppedError("stopped")


class Unanswered(OwnNodes):
    """The nodes cannot be given back, until the user wants nothing but to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupts = 0

    def interrupt(self) -> None:
        self.interrupts += 1

    async def end(self) -> None:
        import asyncio

        if not self.interrupts:
            me()
        while self.interrupts < 2:
            await asyncio.sleep(0.01)
        raise WaitStoppedError("the phase was not finished")


class AtStep(Progress):
    """A signal when a step's line is written, which its checkpoint follows."""

    def step(self, metrics: Metrics) -> None:
        super().step(metrics)
        if metrics["step"] == 1:
            me()


class AtTheEnd(Progress):
    """A signal when the work is done and the files are closed."""

    def close(self) -> None:
        super().close()
        me()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("phase", ["rollout", "train", "end", "checkpoint", "close", "nodes"])
def test_every_phase(tmp_path: Path, phase: str, workers: int) -> None:
    bench = Bench(tmp_path, devices__per_node=workers)
    changes = {"checkpoint": {"every": 1, "grace_s": 100}}
    options: dict[str, Any] = {"phases": Told(phase, 2)}
    if phase in ("checkpoint", "close"):
        options = {"progress": AtStep if phase == "checkpoint" else AtTheEnd}
    elif phase == "nodes":
        options = {"phases": Waiting("rollout", 1)}
    (bench.shop.folder / "run-marker").touch()
    code, said = stopped(bench.config("run", **changes), **options)
    assert code == 143
    assert phase == "close" or "Continue with --resume auto" in said
    bench.assert_goes_on("run", **changes)


@pytest.mark.slow
def test_the_nodes_of_a_training_do_not_come(bench: Bench) -> None:
    """The rollout is over and its nodes are given back: the step is dropped."""
    changes = {"checkpoint": {"every": 0, "grace_s": 20}}
    name = "no-train"
    (bench.shop.folder / f"{name}-marker").touch()
    code, said = stopped(bench.config(name, **changes), phases=Waiting("train", 2))
    assert code == 143
    assert "step 1 is dropped before its end" in said
    assert checkpoints(bench.shop.folder / name) == [1]
    bench.assert_goes_on(name, **changes)


@pytest.mark.usefixtures("nearly_all_for_the_checkpoint")
def test_a_daemon_that_is_away_loses_no_step(bench: Bench) -> None:
    changes = {"checkpoint": {"every": 0, "grace_s": 20}}
    (bench.shop.folder / "away-marker").touch()
    code, said = stopped(bench.config("away", **changes), phases=Unanswered())
    assert code == 143
    assert "checkpoint-1 holds all 1 steps" in said
    bench.assert_goes_on("away", **changes)


def test_a_signal_before_the_first_step_does_not_say_that_all_are_done(bench: Bench) -> None:
    """Of a resumed run, which waits for nodes."""
    changes = {"checkpoint": {"every": 0, "grace_s": 100}}
    (bench.shop.folder / "waits-marker").touch()
    job.train(bench.config("waits", **changes, steps=1), progress=quiet())
    nodes = Waiting("rollout", 1)
    nodes.asked = 1
    code, said = stopped(bench.config("waits", **changes), resume=True, phases=nodes)
    assert code == 143
    assert "nothing to do" not in said
    assert "checkpoint-1 holds all 1 steps" in said
    bench.assert_goes_on("waits", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("grace", [20, 100])
def test_in_an_evaluation(bench: Bench, grace: float) -> None:
    """One that hangs is dropped and one that does not is finished; the steps are the same."""
    name = f"evaluated-{grace}"
    held_out = bench.shop.folder / "held-out.jsonl"
    held_out.write_text('{"id": "h", "prompt": "500", "answer": "1"}\n', encoding="utf-8")
    evaluated = {"data": {"path": str(held_out)}, "every": 1}
    options = {"at": 500, "hangs": grace == 20}
    changes = {"checkpoint": {"every": 0, "grace_s": grace}, "eval": evaluated}
    code, said = stopped(bench.config(name, options, **changes))
    assert code == 143
    assert "checkpoint-0 holds all 0 steps" in said
    bench.assert_goes_on(name, options, **changes)


def when_there_is(path: Path, act: Callable[[], None]) -> threading.Thread:
    def watch() -> None:
        while not path.exists():
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_while_the_report_is_written(bench: Bench) -> None:
    config = bench.config("reported")
    (bench.shop.folder / "reported-marker").touch()
    thread = when_there_is(bench.shop.folder / "reported" / "timeline.json", me)
    code, said = stopped(config)
    thread.join()
    assert code == 143
    assert "no work is lost" in said
    bench.assert_goes_on("reported")


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(bench: Bench) -> None:
    """The step hangs and there is all the time in the world; workers and rewards end too."""
    options = {"hangs": True}
    changes = {"checkpoint": {"every": 1, "grace_s": 10_000}}
    tree = bench.tree("twice", **options) | changes
    process = start_cli("train", bench.shop.file("twice", "exact", **tree))
    try:
        # The reward sends the first one; within half a second a second one would be its echo.
        assert process.stderr is not None
        assert any("a checkpoint follows within" in line for line in process.stderr)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    finally:
        kill_group(process)
    assert process.returncode == 143
    assert "stopped at once by SIGTERM" in said
    assert "Traceback" not in said
    bench.assert_goes_on("twice", options, **changes)
