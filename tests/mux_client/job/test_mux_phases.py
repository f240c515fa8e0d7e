"""Phases of real jobs under a real daemon: order, exclusion, loss of the lease, lost answers."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from mux_real_daemon import Daemon, background, forgetful_proxy, spec

from rollpacker.rollmux.service.client.client import (
    LeaseLostError,
    MuxClient,
    MuxError,
    UnreachableError,
)
from rollpacker.rollmux.service.client.phase import Phases


def test_two_jobs_share_nodes_one_at_a_time(daemon: Daemon) -> None:
    spans: list[tuple[str, float, float]] = []
    jobs = {name: daemon.job(name) for name in ("left", "right")}

    def run(phases: Phases) -> None:
        for _ in range(4):
            for name in ("rollout", "train"):
                with phases.phase(name) as permit:
                    assert permit is not None
                    begun = time.monotonic()
                    time.sleep(0.05)
                    spans.extend((node, begun, time.monotonic()) for node in permit.nodes)

    threads = [threading.Thread(target=run, args=(phases,)) for phases in jobs.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    nodes = {node for node, _, _ in spans}
    assert len(nodes) == 2, "the jobs were not put on the same nodes"
    assert len(spans) == 16
    for node in nodes:
        mine = sorted(span[1:] for span in spans if span[0] == node)
        assert all(first[1] <= second[0] for first, second in pairwise(mine))
    for name, phases in jobs.items():
        assert daemon.finished(name) == ["rollout", "train"] * 4
        phases.end()


def test_a_tail_is_offered_until_somebody_takes_its_nodes(daemon: Daemon) -> None:
    first, second = daemon.job("has-a-tail"), daemon.job("wants-nodes")
    got: list[tuple[str, ...]] = []

    def wait() -> None:
        with second.phase("rollout") as permit:
            assert permit is not None
            got.append(permit.nodes)

    assert not first.offer_tail()
    waiting = threading.Thread(target=wait)
    with first.phase("rollout") as permit:
        assert permit is not None
        assert not first.offer_tail()
        waiting.start()
        until = time.monotonic() + 30
        while not first.offer_tail():
            assert time.monotonic() < until
            time.sleep(0.05)
        waiting.join(timeout=30)
        assert got == [permit.nodes]
        assert first.offer_tail()
    for phases in (first, second):
        phases.end()


def test_without_a_daemon_phases_just_run() -> None:
    alone = Phases(None, "nobody")
    calls: list[str] = []

    @alone.phase("rollout")
    def rollout(text: str) -> int:
        alone.check()
        calls.append(text)
        return 7

    alone.submit(spec("nobody"))
    assert [rollout("a"), rollout("b")] == [7, 7]
    alone.end()
    assert calls == ["a", "b"]


class Recorder:
    """A state that notes when it is loaded and offloaded."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self) -> None:
        self.calls.append("load")

    def offload(self) -> None:
        self.calls.append("offload")


def test_a_phase_that_raises_is_asked_for_again(daemon: Daemon) -> None:
    state = Recorder()
    phases = daemon.job("raises", states={"rollout": state})

    @phases.phase("rollout")
    def rollout(fails: bool) -> None:
        state.calls.append("run")
        if fails:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        rollout(True)
    rollout(False)
    assert state.calls == ["load", "run", "offload"] * 2
    with pytest.raises(MuxError) as refused, phases.phase("rollout"):
        pass
    assert (refused.value.code, refused.value.answer["next"]) == ("order", "train")
    assert daemon.finished("raises") == ["rollout"]
    phases.end()


def test_a_state_leaves_its_devices_once_where_finish_is_refused(daemon: Daemon) -> None:
    state = Recorder()
    phases = daemon.job("refused", states={"rollout": state})

    def lose() -> None:
        with phases.phase("rollout") as permit:
            assert permit is not None
            daemon.client().abandon(permit)

    with pytest.raises(LeaseLostError):
        lose()
    assert state.calls == ["load", "offload"]


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One whose leases are waited for."""
    running = Daemon(tmp_path_factory.mktemp("hasty"), ttl=2.5)
    yield running
    running.stop()


def test_a_heartbeat_keeps_a_phase_longer_than_the_lease(hasty: Daemon) -> None:
    phases = hasty.job("long")
    with phases.phase("rollout"):
        until = time.monotonic() + 1.5 * hasty.ttl
        while time.monotonic() < until:
            phases.check()
            time.sleep(0.05)
    assert hasty.finished("long") == ["rollout"]
    phases.end()


SLEEPER = """
import sys, time
from rollpacker.rollmux.service.client.client import LeaseLostError, MuxClient
from rollpacker.rollmux.service.client.phase import Phases
url, token, job = sys.argv[1:]
phases = Phases(MuxClient(url, token), job)
try:
    with phases.phase("rollout"):
        print("running", flush=True)
        while True:
            time.sleep(0.01)
            phases.check()
except LeaseLostError:
    print("lost", flush=True)
"""


def test_a_process_that_was_stopped_too_long_notices_before_it_goes_on(hasty: Daemon) -> None:
    phases = hasty.job("stopped")
    other = background(SLEEPER, hasty.url, hasty.token_file, "stopped")
    assert other.stdout is not None
    assert other.stdout.readline() == "running\n"
    os.kill(other.pid, signal.SIGSTOP)
    with phases.phase("rollout"):  # granted only when the stopped process's lease has run out
        os.kill(other.pid, signal.SIGCONT)
        assert other.stdout.readline() == "lost\n"
        phases.check()
    other.communicate(timeout=20)
    assert hasty.finished("stopped") == ["rollout"]
    phases.end()


def test_lost_answers_do_nothing_twice(daemon: Daemon) -> None:
    with forgetful_proxy(daemon.port) as url:
        phases = daemon.job("forgetful", url)
        for _ in range(3):
            for name in ("rollout", "train"):
                with phases.phase(name):
                    pass
        assert daemon.finished("forgetful") == ["rollout", "train"] * 3
        phases.end()


def work_until_lost(phases: Phases) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        phases.check()
        time.sleep(0.01)
    pytest.fail("the lease was never lost")


def test_a_lease_is_not_kept_by_waiting_for_a_daemon_that_is_away(tmp_path: Path) -> None:
    away = Daemon(tmp_path, ttl=1.0)
    try:
        phases = away.job("left-alone")
        away.kill()
        away.start()

        @phases.phase("rollout")
        def work_without_a_daemon() -> None:
            away.kill()
            work_until_lost(phases)

        with pytest.raises(LeaseLostError):
            work_without_a_daemon()
    finally:
        away.stop()


def test_wrong_settings_are_said_in_one_line(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with pytest.raises(ValueError, match=r"mux\.token_file .*token"):
        MuxClient("http://127.0.0.1:1", token)
    token.write_text("a secret of length")
    token.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        MuxClient("http://127.0.0.1:1", token)
    token.chmod(0o600)
    with pytest.raises(ValueError, match=r"mux\.url .* must be"):
        MuxClient("ftp://127.0.0.1", token)
    assert MuxClient("http://[::1]:1", token).address == "[::1]:1"
    with pytest.raises(UnreachableError):
        MuxClient("http://127.0.0.1:1", token, patience_s=0.3).status()
