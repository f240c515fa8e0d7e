"""What a worker's process does besides serving."""

import signal
from threading import Event

from rollpacker.config import parse
from rollpacker.core.types import EngineId, ReplicaId
from rollpacker.processes.children import OUTSIDE
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.worker import EnginePart, ReplicaPart, WorkerSpec
from rollpacker.runtime.worker.worker_process import main


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
