"""A wait that is longer than a lease."""

import threading
import time
from pathlib import Path

from mux_real_daemon import Daemon

from rollpacker.rollmux.service.client import Permit
from rollpacker.rollmux.service.link import new_key
from rollpacker.rollmux.service.phase_lease import acquire


def test_a_permit_that_was_waited_for_longer_than_a_lease_is_whole(tmp_path: Path) -> None:
    """It used to count from when it was asked for, and was over before it came."""
    daemon = Daemon(tmp_path, ttl=1.5)
    got: list[tuple[Permit, float]] = []
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
