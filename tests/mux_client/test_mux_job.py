"""The phases of a ``rollpacker train`` job: displaced, interrupted, and without a daemon."""

import asyncio
import time
from pathlib import Path

import pytest
from mux_real_daemon import Daemon

from rollpacker.config import MuxConfig, RunConfig
from rollpacker.rollmux.service.phase_job import JobPhases
from rollpacker.runtime.phases import DisplacedError, StoppedError


def phases_of(daemon: Daemon, name: str) -> JobPhases:
    mux = {"url": daemon.url, "token_file": str(daemon.token_file), "job": name, "slo": 8.0}
    mux |= {"worst_rollout_s": 1.0, "worst_train_s": 1.0}
    config = RunConfig.model_construct(output=f"runs/{name}", mux=MuxConfig.model_validate(mux))
    return JobPhases(config)


def no_pids() -> list[int]:
    return []


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
        await phases.open(no_pids, failed, released)
        await phases.begin("rollout")
        await phases.end()
        daemon.client().node_failed(daemon.client().job("displaced")["train_nodes"][0], "fire")
        with pytest.raises(DisplacedError):
            await phases.begin("train")
        await phases.close(displaced=True)
        known = daemon.client().job("displaced")
        assert known["state"] == "idle"
        await phases.open(no_pids, failed, released)
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
            await each.open(no_pids, failed, released)
        await holder.begin("rollout")
        waiting = asyncio.create_task(waiter.begin("rollout"))
        await until(lambda: daemon.client().job("waiter")["state"] == "waiting")
        waiter.interrupt()
        began = time.monotonic()
        with pytest.raises(StoppedError):
            await waiting
        assert time.monotonic() - began < 10
        for each in (waiter, holder):
            await each.close()

    asyncio.run(run())


@pytest.mark.parametrize("where", ["waiting", "running", "finishing"])
def test_a_job_can_stop_while_the_daemon_is_away(tmp_path: Path, where: str) -> None:
    away = Daemon(tmp_path, ttl=1.0)
    phases = phases_of(away, "left-alone")

    async def run() -> float:
        await phases.open(no_pids, failed, released)
        if where != "waiting":
            await phases.begin("rollout")
        away.kill()
        asked = None
        if where == "waiting":
            asked = asyncio.create_task(phases.begin("rollout"))
            await asyncio.sleep(0.5)
        elif where == "running":
            await until(lambda: phases.stats["lost"])
        else:
            asked = asyncio.create_task(phases.end())
            await asyncio.sleep(0.5)
        began = time.monotonic()
        phases.interrupt()
        phases.interrupt()
        if asked is not None:
            with pytest.raises(StoppedError):
                await asked
        await phases.close()
        return time.monotonic() - began

    try:
        assert asyncio.run(asyncio.wait_for(run(), 60)) < 30
    finally:
        away.stop()
