"""A wait that is longer than a lease, and heartbeats whose answers come when it is over."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mux_real_daemon import Daemon
from test_mux_job import Nobody, failed, phases_of, released

from rollpacker.rollmux.service.client.client import LeaseLostError, MuxClient, PhasePermit, new_key
from rollpacker.rollmux.service.client.phase import HeldLease, acquire


def test_a_permit_that_was_waited_for_longer_than_a_lease_is_whole(tmp_path: Path) -> None:
    """It used to count from when it was asked for, and was over before it came."""
    daemon = Daemon(tmp_path, ttl=1.5)
    got: list[tuple[PhasePermit, float]] = []
    try:
        for name in ("dead", "waits"):
            daemon.job(name)
        daemon.client().permit("dead", "rollout", new_key())

        def wait() -> None:
            permit = acquire(daemon.client(), "waits", "rollout", lambda _move: None)
            got.append((permit, permit.stop_at - time.monotonic()))

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(timeout=30)
        ((permit, left),) = got
        assert permit.lease_s == 1.5
        assert left > 0.3 * permit.lease_s
    finally:
        daemon.stop()


class Slow(MuxClient):
    """Its heartbeats are answered only when the test says so."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon.url, daemon.token_file, patience_s=30.0)
        self.sent, self.over, self.idle = threading.Event(), threading.Event(), threading.Event()

    def heartbeat(self, permit: PhasePermit) -> tuple[float, bool]:
        found = super().heartbeat(permit)
        self.sent.set()
        assert self.over.wait(20.0)
        # Whoever takes the workers for idle already has said so by then.
        self.idle.wait(0.3)
        return found

    def finish(self, permit: PhasePermit, seconds: float, key: str) -> dict[str, object]:
        found = super().finish(permit, seconds, key)
        self.over.set()
        return found


class Fenced(Nobody):
    """Keeps until when its processes may run."""

    def __init__(self, client: Slow) -> None:
        super().__init__()
        self.until: list[float | None] = []
        self._client = client

    def fence(self, stop_at: float | None) -> None:
        self.until.append(stop_at)
        if stop_at is None:
            self._client.idle.set()


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One whose leases are extended soon."""
    running = Daemon(tmp_path_factory.mktemp("hasty"), ttl=2.0)
    yield running
    running.stop()


def test_workers_that_are_idle_are_under_no_lease(hasty: Daemon) -> None:
    """A heartbeat was under way when the phase was finished."""
    client = Slow(hasty)
    phases, tenant = phases_of(hasty, "late", client=client), Fenced(client)

    async def run() -> None:
        await phases.open(tenant, failed, released)
        await phases.begin("rollout")
        assert await asyncio.to_thread(client.sent.wait, 20.0)
        await phases.end()
        await asyncio.sleep(0)
        assert tenant.until[-1] is None
        await phases.close()

    asyncio.run(run())


def test_a_lease_that_is_given_up_is_extended_by_no_late_answer(hasty: Daemon) -> None:
    """Its workers are frozen by then, and would go on without a permit."""
    hasty.job("gives-up")
    client, extended = Slow(hasty), list[float]()
    permit = client.permit("gives-up", "rollout", new_key())
    assert isinstance(permit, PhasePermit)
    lease = HeldLease(client, permit, on_extended=extended.append)
    assert client.sent.wait(20.0)
    lease.give_up("the daemon says so")
    client.over.set()
    lease.close()
    assert not extended
    with pytest.raises(LeaseLostError, match="the daemon says so"):
        lease.check()
