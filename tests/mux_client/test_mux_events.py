"""``GET /v1/events`` of a daemon with real clients, given to the checker of event logs."""

import threading
import time
import urllib.request
from pathlib import Path

import pytest
from event_check import check_file
from mux_real_daemon import Daemon


def fetch(daemon: Daemon, path: Path, what: str = "events") -> Path:
    token = daemon.token_file.read_text().strip()
    asked = urllib.request.Request(
        f"{daemon.url}/v1/{what}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        path.write_bytes(answer.read())
    return path


def work(daemon: Daemon, name: str, iterations: int) -> None:
    phases = daemon.job(name)
    with pytest.raises(KeyError), phases.phase("rollout"):
        raise KeyError(name)
    for _ in range(iterations):
        for each in ("rollout", "train"):
            with phases.phase(each):
                time.sleep(0.1)
    phases.end()


def test_a_daemons_log_passes_the_check(tmp_path: Path) -> None:
    """Jobs side by side, each with a phase that was given up; one leaves early, one goes on."""
    daemon = Daemon(tmp_path / "state", ttl=20.0)
    try:
        threads = [
            threading.Thread(target=work, args=(daemon, f"j{n}", count))
            for n, count in enumerate((0, 1, 4))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        with daemon.job("goes-on").phase("rollout"):
            assert check_file(fetch(daemon, tmp_path / "events.jsonl")) == []
    finally:
        daemon.stop()
