"""The phases of a ``rollpacker train`` job: displaced, interrupted, and without a daemon."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mux_real_daemon import Daemon, free_port

from rollpacker.config import MuxConfig, RunConfig
from rollpacker.core.types import Phase
from rollpacker.rollmux.node import keeper
from rollpacker.rollmux.service.client.client import (
    DaemonLink,
    LeaseLostError,
    MuxClient,
    MuxError,
    UnreachableError,
    new_key,
)
from rollpacker.rollmux.service.job.phase_job import JobPhases
from rollpacker.runtime.ipc import watchdog as guard_process
from rollpacker.runtime.ipc.watchdog_client import Watchdog
from rollpacker.runtime.step.phase_nodes import DisplacedError, WaitStoppedError


def phases_of(
    daemon: Daemon, name: str, *, output: str = "", client: MuxClient | None = None, **more: Any
) -> JobPhases:
    mux = {"url": daemon.url, "token_file": str(daemon.token_file), "job": name, "slo": 8.0}
    mux |= {"worst_rollout_s": 1.0, "worst_train_s": 1.0} | more
    output = output or f"runs/{name}"
    config = RunConfig.model_construct(output=output, mux=MuxConfig.model_validate(mux))
    return JobPhases(config, client, said.append)


said: list[str] = []


class Nobody:
    """Has processes that take no part; keeps what it was told."""

    def __init__(self, *pids: int, keeps: int = 0) -> None:
        self.pids = pids
        self.told: list[str] = []
        self._keeps = keeps

    def fence(self, stop_at: float | None) -> None:
        del stop_at

    async def offload(self, phase: Phase) -> int:
        self.told.append(f"{phase} leaves")
        return self._keeps

    async def onload(self, phase: Phase) -> None:
        self.told.append(f"{phase} comes")


def released() -> None:
    pytest.fail("nobody offered a tail")


def failed(error: Exception) -> None:
    """A running phase was told to stop."""
    del error


async def until(condition: object, seconds: float = 30.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.05)


def test_a_displaced_job_keeps_its_name_and_its_account(daemon: Daemon) -> None:
    phases = phases_of(daemon, "displaced")

    async def run() -> None:
        await phases.open(Nobody(), failed, released)
        await phases.begin("rollout")
        await phases.end()
        daemon.client().node_failed(daemon.client().job("displaced")["train_nodes"][0], "fire")
        with pytest.raises(DisplacedError):
            await phases.begin("train")
        await phases.close(displaced=True)
        known = daemon.client().job("displaced")
        assert known["state"] == "idle"
        await phases.open(Nobody(), failed, released)
        await phases.begin("rollout")
        await phases.end()
        again = daemon.client().job("displaced")
        assert again["arrived_s"] == known["arrived_s"]
        assert again["next"] == "train"
        await phases.close()

    asyncio.run(run())
    assert daemon.client().job("displaced")["state"] == "ended"
    assert "displaced.2" not in {job["id"] for job in daemon.client().status()["jobs"]}


def test_an_interrupt_ends_the_wait_for_nodes(daemon: Daemon) -> None:
    """At once for a rollout; while a step is under way the second one does."""
    holder, waiter = phases_of(daemon, "holder"), phases_of(daemon, "waiter")

    async def run() -> None:
        for each in (holder, waiter):
            await each.open(Nobody(), failed, released)
        await holder.begin("rollout")
        waiting = asyncio.create_task(waiter.begin("rollout"))
        await until(lambda: daemon.client().job("waiter")["state"] == "waiting")
        waiter.interrupt()
        began = time.monotonic()
        with pytest.raises(WaitStoppedError):
            await waiting
        assert time.monotonic() - began < 10
        for each in (waiter, holder):
            await each.close()

    asyncio.run(run())


class Hurried(MuxClient):
    """Gives up ten times sooner than a job's client, and notes it."""

    def __init__(self, daemon: Daemon, url: str = "") -> None:
        usual = phases_of(daemon, "usual")._client._patience_s
        super().__init__(url or daemon.url, daemon.token_file, patience_s=usual / 10)
        self.gave_up: list[str] = []

    def call(
        self, method: str, path: str, *more: Any, patience_s: float | None = None, **options: Any
    ) -> tuple[float, dict[str, Any]]:
        patience_s = None if patience_s is None else patience_s / 10
        try:
            return super().call(method, path, *more, patience_s=patience_s, **options)
        except UnreachableError:
            self.gave_up.append(path)
            raise


def test_a_job_can_stop_while_the_daemon_is_away(tmp_path: Path) -> None:
    """It waits for nodes, runs, or has finished a phase."""
    away = Daemon(tmp_path, ttl=1.0)
    places = ("finishing", "running", "waiting")
    jobs = {where: phases_of(away, where, client=Hurried(away)) for where in places}

    async def stopped(where: str) -> None:
        phases, asked = jobs[where], None
        if where == "running":
            await until(lambda: phases.stats["lost"])
        else:
            asked = asyncio.create_task(
                phases.begin("rollout") if where == "waiting" else phases.end()
            )
            await until(lambda: phases._client.gave_up)  # type: ignore[attr-defined]
        phases.interrupt()
        phases.interrupt()
        if asked is not None:
            with pytest.raises(WaitStoppedError):
                await asked
        await phases.close()

    async def run() -> None:
        for phases in jobs.values():
            await phases.open(Nobody(), failed, released)
            if phases is not jobs["waiting"]:
                await phases.begin("rollout")
            if phases is jobs["finishing"]:
                await phases.end()
                await phases.begin("train")
        away.kill()
        await asyncio.gather(*map(stopped, jobs))

    try:
        asyncio.run(asyncio.wait_for(run(), 60))
    finally:
        away.stop()


def test_a_displaced_job_may_come_back_while_the_daemon_drains(daemon: Daemon) -> None:
    phases, late = phases_of(daemon, "stays"), phases_of(daemon, "late")
    link = DaemonLink(daemon.url, daemon.token_file, patience_s=9.0)

    async def run() -> None:
        await phases.open(Nobody(), failed, released)
        await phases.begin("rollout")
        await phases.end()
        link.call("POST", "/v1/drain", {"draining": True}, new_key())
        await phases.close(displaced=True)
        with pytest.raises(MuxError, match="draining"):
            await late.open(Nobody(), failed, released)
        await late.close()
        await phases.open(Nobody(), failed, released)
        await phases.begin("train")
        await phases.close()

    try:
        asyncio.run(run())
    finally:
        link.call("POST", "/v1/drain", {"draining": False}, new_key())


def test_a_job_of_another_run_is_left_alone(daemon: Daemon) -> None:
    mine, other = phases_of(daemon, "mine"), phases_of(daemon, "mine", output="runs/other")

    async def run() -> None:
        await mine.open(Nobody(), failed, released)
        with pytest.raises(ValueError, match=r"mux\.job=mine: another run has a live job"):
            await other.open(Nobody(), failed, released)
        await other.close()
        assert daemon.client().job("mine")["state"] == "idle"
        await mine.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("cores", "problem"), [({"train": [0]}, "mux.cores has neither"), ({"rollout": [9999]}, "9999")]
)
def test_nodes_that_cannot_be_used_are_given_back(
    daemon: Daemon, cores: dict[str, list[int]], problem: str
) -> None:
    phases = phases_of(daemon, f"unpinned-{len(problem)}", cores=cores)

    async def run() -> None:
        await phases.open(Nobody(os.getpid()), failed, released)
        with pytest.raises(ValueError, match=problem):
            await phases.begin("rollout")
        assert daemon.client().job(f"unpinned-{len(problem)}")["state"] == "idle"
        await phases.close()

    asyncio.run(run())


def test_a_tail_gives_its_nodes_to_a_job_that_waits(daemon: Daemon) -> None:
    tail, waiter = phases_of(daemon, "tail"), phases_of(daemon, "waits")
    told: list[str] = []

    async def run() -> None:
        await tail.open(Nobody(), failed, lambda: told.append("release"))
        await waiter.open(Nobody(), failed, released)
        await tail.begin("rollout")
        waiting = asyncio.create_task(waiter.begin("rollout"))
        await until(lambda: daemon.client().job("waits")["state"] == "waiting")
        assert not told
        await tail.offer_tail()
        await until(lambda: told == ["release"])
        await waiting
        nodes = [daemon.client().job(name)["permit"]["nodes"] for name in ("tail", "waits")]
        assert nodes[0] == nodes[1]
        await tail.end()
        await waiter.end()
        for each in (tail, waiter):
            await each.close()

    asyncio.run(run())
    assert (tail.stats["tails"], waiter.stats["tails"]) == (1, 0)


def test_while_the_daemon_is_not_there_the_user_is_told_once(daemon: Daemon) -> None:
    client = Hurried(daemon, f"http://127.0.0.1:{free_port()}")
    phases = phases_of(daemon, "early", client=client)
    said.clear()

    async def run() -> None:
        opening = asyncio.create_task(phases.open(Nobody(), failed, released))
        await until(lambda: said and len(client.gave_up) > 2)
        assert not opening.done()
        await phases.close()
        with pytest.raises(LeaseLostError):
            await opening

    asyncio.run(run())
    assert len(said) == 1
    assert said[0].startswith("waiting for the RollMux daemon (mux.url)")


def test_a_process_that_is_not_watched_any_more_goes_on() -> None:
    """Both lines are read at once: the first one counts too."""
    child = subprocess.Popen(["sleep", "60"])
    guard = subprocess.Popen([sys.executable, guard_process.__file__], stdin=subprocess.PIPE)
    try:
        assert guard.stdin is not None
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        lines = [{"pids": [child.pid], "stop_at": None}, {"pids": [], "stop_at": None}]
        guard.stdin.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        guard.stdin.close()
        guard.wait(30)
        assert os.waitpid(child.pid, os.WCONTINUED | os.WNOHANG)[1] == 0xFFFF
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("script", [guard_process, keeper], ids=lambda each: each.__name__)
def test_a_process_that_may_not_be_signalled_keeps_no_other_from_it(script: ModuleType) -> None:
    """Its number was another user's by then: those after it went on without a permit."""
    nobody = 65534
    if os.geteuid() != 0 and os.stat("/proc/1").st_uid == os.geteuid():
        pytest.skip("all processes here are this user's")
    as_nobody = {"user": nobody} if os.geteuid() == 0 else {}
    child = subprocess.Popen(["sleep", "60"], **as_nobody)
    source = Path(str(script.__file__)).read_text(encoding="utf-8")
    # As a program: it imports nothing of this package.
    those = f"[1, {child.pid}]"
    told = (
        f"send({those}, 9)"
        if script is keeper
        else f"ends = {{}}; follow(ends, {those}); send(ends, 9)"
    )
    code = source.partition('if __name__ == "__main__"')[0] + told
    try:
        subprocess.run(["python3", "-S", "-c", code], **as_nobody, cwd="/", check=True)
        assert child.wait(30) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_a_guard_that_has_died_is_dismissed_all_the_same() -> None:
    """A job ended with this, and not with what it had to say."""
    guard = Watchdog()
    guard._process.kill()
    guard._process.wait()
    with pytest.raises(BrokenPipeError):
        guard.tell([], None)
    guard.dismiss()


def test_time_after_the_lease_is_no_work(daemon: Daemon) -> None:
    phases = phases_of(daemon, "frozen")

    class Over:
        stop_at = time.monotonic() - 5.0

    phases._running_since = time.monotonic() - 8.0
    phases._freeze(Over())  # type: ignore[arg-type]
    assert phases._active_s == pytest.approx(3.0, abs=0.5)


def test_states_are_on_the_devices_of_their_phase_only(daemon: Daemon) -> None:
    phases, tenant = phases_of(daemon, "resident"), Nobody()

    async def run() -> None:
        await phases.open(tenant, failed, released)
        for _ in range(2):
            for phase in ("rollout", "train"):
                await phases.begin(phase)
                await phases.begin(phase)
            await phases.end()
        await phases.close()

    asyncio.run(run())
    iteration = ["rollout leaves", "train comes", "train leaves"]
    again = ["rollout comes", *iteration]
    assert tenant.told == ["train leaves", *iteration, *again]


def test_a_job_keeps_no_more_in_host_memory_than_it_promised(daemon: Daemon) -> None:
    phases = phases_of(daemon, "fat", train_memory_gb=1.0, rollout_memory_gb=3.0)

    async def run() -> None:
        await phases.open(Nobody(keeps=2 * 2**30), failed, released)
        with pytest.raises(ValueError, match=r"mux\.train_memory_gb=1 is too low: .* 2 GB"):
            await phases.begin("rollout")
        await phases.close()

    asyncio.run(run())
