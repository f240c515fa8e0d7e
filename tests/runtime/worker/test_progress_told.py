"""What a worker's heartbeats say of its work."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import Any, cast

import pytest

from rollpacker.config import FakeEngineConfig
from rollpacker.engine.fake import FakeEngine
from rollpacker.runtime.ipc.link import Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.engine_worker import EngineWorker, FollowingWorker
from rollpacker.runtime.worker.worker import Role, Server


class Stuck(FakeEngine):
    """Never ends a step, or ends each and comes to nothing."""

    def __init__(self, *, returns: bool) -> None:
        super().__init__(FakeEngineConfig(kind="fake"))
        self.returns, self.over = returns, threading.Event()

    def busy(self) -> bool:
        return True

    def step(self) -> list[Any]:
        if not self.returns:
            self.over.wait()
        time.sleep(0.001)
        return []


def told(role: Any, over: threading.Event) -> list[msg.Beat]:
    """Some heartbeats of a worker that serves as ``role`` until ``over``."""
    ours, theirs = socket.socketpair()
    driver, server = Wire(ours), Server(Wire(theirs), 0.02)

    def serve() -> None:
        with suppress(EOFError):
            server.serve(lambda _send: cast(Role, role))

    thread = threading.Thread(target=serve)
    thread.start()
    beats: list[msg.Beat] = []
    while len(beats) < 6:
        report = driver.recv()
        beats += [report] if isinstance(report, msg.Beat) else []
    driver.send(msg.Stop())
    over.set()
    thread.join()
    driver.close()
    return beats


@pytest.mark.parametrize("returns", [False, True])
def test_an_engine_that_comes_to_nothing_stays_at_one_piece_of_work(returns: bool) -> None:
    engine = Stuck(returns=returns)
    last = told(EngineWorker(engine, lambda _report: None), engine.over)[-3:]
    assert {beat.at for beat in last} == {"a decode step"}
    assert len({beat.done for beat in last}) == 1


def test_one_that_follows_another_is_at_nothing_of_its_own() -> None:
    over = threading.Event()

    class Lead:
        def recv_bytes(self) -> bytes:
            over.wait()
            raise EOFError

        def close(self) -> None:
            pass

    role = FollowingWorker(FakeEngine(FakeEngineConfig(kind="fake")), cast(Any, Lead()))
    assert {beat.at for beat in told(role, over)} == {""}
