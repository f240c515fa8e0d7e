"""A worker's process: signals, heartbeats, and its share of a device's memory."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from runtime_jobs import Workshop, metrics, run

from rollpacker.config import DevicesConfig, FakeEngineConfig, MiniEngineConfig, parse
from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.engine.fake import FakeEngine
from rollpacker.engine.mini import MiniEngine
from rollpacker.processes.children import OUTSIDE
from rollpacker.runtime.cluster.devices import place_devices
from rollpacker.runtime.ipc.link import Wire
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.engine_worker import EngineWorker, FollowingWorker
from rollpacker.runtime.worker.worker import EnginePart, ReplicaPart, Role, Server, WorkerSpec
from rollpacker.runtime.worker.worker_process import main
from rollpacker.train.model.loading import load_model


class Driver:
    """Listens, and notes which signals are blocked where it is told something."""

    def __init__(self) -> None:
        self.heard: list[msg.Report] = []
        self.blocked: set[int] = set()
        self._gone = Event()

    def send(self, report: msg.Report) -> None:
        self.heard.append(report)
        self.blocked = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    def recv(self) -> msg.Command:
        self._gone.wait()
        raise EOFError

    def close(self) -> None:
        self._gone.set()


def test_a_worker_takes_no_notice_of_signals_whatever_it_was_forked_off(tmp_path) -> None:
    tree = {
        "output": str(tmp_path / "run"),
        "model": {"path": str(tmp_path / "nothing")},
        "data": {"path": "rows.jsonl"},
        "rewards": [{"function": "math"}],
        "devices": {"kind": "cpu"},
    }
    driver = Driver()
    spec = WorkerSpec(
        config=parse(tree, source="test"),
        rank=0,
        cores=(),
        device="cpu",
        max_length=8,
        total_updates=1,
        engine=EnginePart(engine=EngineId(0)),
        replica=ReplicaPart(replica=ReplicaId(0)),
    )
    assert not set(OUTSIDE) & set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    main(driver, spec)
    driver.close()
    (died,) = driver.heard
    assert isinstance(died, msg.Died)
    assert died.fault.kind == "user"
    assert set(OUTSIDE) <= driver.blocked


# Where workers run: several on one GPU share its memory.


@pytest.mark.parametrize(
    ("count", "per_gpu", "gpus", "places"),
    [
        (0, 1, 2, ["cuda:0", "cuda:1"]),
        (0, 2, 1, ["cuda:0", "cuda:0"]),
        (0, 2, 2, ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]),
        (3, 2, 2, ["cuda:0", "cuda:0", "cuda:1"]),
    ],
)
def test_workers_fill_one_gpu_after_the_other(
    count: int, per_gpu: int, gpus: int, places: list[str]
) -> None:
    devices = DevicesConfig(per_node=count, per_gpu=per_gpu)
    assert [device for device, _ in place_devices(devices, gpus)] == places


def test_more_workers_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices\.per_node is 3, but .* devices\.per_gpu=2"):
        place_devices(DevicesConfig(per_node=3, per_gpu=2), 1)


def test_a_run_on_the_cpu_has_no_workers_per_gpu(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, rows=2)
    with pytest.raises(ValueError, match=r"devices\.per_gpu is 2, but the run is on CPUs"):
        run(shop.config("two", devices__per_node=2, devices__per_gpu=2))


def test_a_sharer_finds_its_kv_budget_in_its_share(tmp_path: Path) -> None:
    """On a CPU it is the machine's memory; what others take meanwhile is no matter."""
    shop = Workshop(tmp_path, rows=2)
    model, _ = load_model(shop.config("one").model, "cpu")
    config = MiniEngineConfig(max_running=1)
    alone, shared = (MiniEngine(model, config=config, sharers=n)._runner for n in (1, 4))
    assert shared.free_bytes(4) == pytest.approx(alone.free_bytes(1) / 4, rel=0.2)


@pytest.mark.gpu
def test_two_workers_train_on_one_gpu(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    devices = {"per_node": 2, "per_gpu": 2, "kind": "cuda"}
    folder, _ = run(shop.config("two", "exact", devices=devices, epochs=1))
    assert {row["policy_version_max_lag"] for row in metrics(folder)} == {0}


# What a worker's heartbeats say of its work.


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
