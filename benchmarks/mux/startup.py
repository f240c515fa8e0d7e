"""How long the RollMux daemon takes to start after many recorded events.

    python -m benchmarks.mux.startup --entries 200000 --live 1000 --state /tmp/mux

Jobs of a few iterations come and go on a core with a clock of its own, without HTTP: as many live
ones at any time. Then the database is opened again, with snapshots and without.
"""

from __future__ import annotations

import heapq
import random
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks._run import flags
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.service.api import bodies
from rollpacker.rollmux.service.api.refused import Refused
from rollpacker.rollmux.service.commands import commands
from rollpacker.rollmux.service.commands.writer import Answer, NoPermitYet
from rollpacker.rollmux.service.state.transaction_log import TransactionLog
from rollpacker.rollmux.service.store import Store

TTL = 3600.0
BATCH = 32
STEP = 50_000


class Crowd:
    """Clients of one core: they submit jobs, ask for phases, finish them, end."""

    def __init__(self, core: TransactionLog, clock: list[float], live: int) -> None:
        self.core = core
        self.clock = clock
        self.random = random.Random(0)
        self.numbers = count(len(core.leased.jobs))
        self.keys = count(core.leased.seq)
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.waiting: dict[str, tuple[str, str]] = {}
        self.snapshots = 0
        for number in range(live):
            self.later(number * 0.5, self.submit)

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.due, (self.clock[0] + seconds, next(self.order), act))

    def run(self, entries: int) -> None:
        """Until so many entries were recorded."""
        while self.core.leased.seq < entries:
            for _ in range(BATCH):
                at, _, act = heapq.heappop(self.due)
                self.clock[0] = max(self.clock[0], at)
                act()
            self.core.expire()
            self.core.commit()
            touched = self.core.leased.touched
            for job in sorted(touched & self.waiting.keys()):
                self.answered(job, *self.waiting.pop(job))
            touched.clear()
            self.snapshots += self.core.keeper.due(self.core.leased.seq)
            self.core.keep()

    def asked(self) -> bodies.Post:
        return bodies.asked(f"key-{next(self.keys)}", "POST /v1", {})

    def submit(self) -> None:
        nodes = self.random.choice([1, 1, 1, 2])
        spec: dict[str, Any] = {
            "id": f"job-{next(self.numbers)}",
            "worst_rollout_s": self.random.uniform(60.0, 300.0),
            "worst_train_s": self.random.uniform(30.0, 120.0),
            "slo": self.random.choice([1.5, 2.0, 3.0]),
            "rollout_nodes": nodes,
            "train_nodes": nodes,
            "iterations": self.random.randint(5, 20),
        }
        body = bodies.NewJob.model_validate(spec)
        commands.submit(self.core, self.asked(), body)
        self.later(1.0, lambda: self.ask(spec["id"], "rollout"))

    def ask(self, job: str, phase: str) -> None:
        asked = self.asked()
        try:
            outcome = commands.permit(self.core, asked, job, phase)  # type: ignore[arg-type]
        except Refused as refused:
            raise AssertionError(refused.body) from refused
        self.told(job, phase, asked.key, outcome)

    def answered(self, job: str, phase: str, key: str) -> None:
        self.told(job, phase, key, commands.poll(self.core, job, key))

    def told(self, job: str, phase: str, key: str, outcome: Answer | NoPermitYet) -> None:
        if isinstance(outcome, NoPermitYet):
            self.waiting[job] = (phase, key)
            return
        body = outcome.body or {}
        if "move" in body:
            number = body["move"]["id"]
            self.later(30.0, lambda: self.moved(job, number, phase, key))
            return
        spec = self.core.leased.jobs[job].spec
        worst = spec.worst_rollout_s if phase == "rollout" else spec.worst_train_s
        seconds = worst * self.random.uniform(0.4, 0.9)
        token = body["token"]
        self.later(seconds, lambda: self.finish(job, token, seconds))

    def moved(self, job: str, number: int, phase: str, key: str) -> None:
        commands.moved(self.core, self.asked(), job, bodies.MovedBody(move=number))
        if self.core.find(key) is None:
            self.ask(job, phase)
        else:
            self.answered(job, phase, key)

    def finish(self, job: str, token: int, seconds: float) -> None:
        body = bodies.FinishedBody(seconds=seconds)
        outcome = commands.finish(self.core, self.asked(), token, body)
        assert isinstance(outcome, Answer)
        assert outcome.body is not None
        wanted = outcome.body["next"]
        if wanted is not None:
            self.later(0.1, lambda: self.ask(job, wanted))
            return
        commands.end(self.core, self.asked(), job)
        self.later(self.random.uniform(0.0, 60.0), self.submit)


@dataclass(frozen=True)
class Start:
    """What a start took.

    Args:
        replayed: entries after the snapshot, or all.
        memory_mb: peak of the process.
    """

    seconds: float
    cpu_s: float
    replayed: int
    memory_mb: float


def start(folder: Path, verified: bool) -> Start:
    """Open the database as ``mux serve`` does."""
    began, cpu = time.perf_counter(), time.process_time()
    store = Store(folder / "mux.sqlite", check=verified)
    after = 0 if verified or not (found := store.snapshots()) else found[0].seq
    core = TransactionLog(store, None, TTL, verified=verified)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    store.close()
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Start(seconds, cpu_s, core.leased.seq - after, memory_mb)


def report(name: str, folder: Path, verified: bool = False) -> None:
    """A start in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        took = pool.submit(start, folder, verified).result()
    print(
        f"{name:28} {took.seconds:8.2f} s ({took.cpu_s:.2f} of CPU),"
        f" {took.replayed:8} entries read, peak {took.memory_mb:.0f} MB",
        flush=True,
    )


def fill(folder: Path, entries: int, live: int) -> None:
    """Record so many entries; the end is that of a killed daemon."""
    clock = [0.0]
    store = Store(folder / "mux.sqlite")
    core = TransactionLog(store, Settings(), TTL, lambda: clock[0])
    crowd = Crowd(core, clock, live)
    began = time.process_time()
    while core.leased.seq < entries:
        crowd.run(min(core.leased.seq + STEP, entries))
        left = len(core.leased.jobs) - len(core.leased.ended)
        seconds = time.process_time() - began
        print(f"{core.leased.seq} entries, {left} live jobs, {seconds:.0f} CPU s", flush=True)
    size_mb = (folder / "mux.sqlite").stat().st_size / 1e6
    print(
        f"{len(core.leased.ended)} jobs have ended; {size_mb:.0f} MB; {crowd.snapshots} snapshots,"
        f" the longest took {core.keeper.longest_s:.3f} s;"
        f" {(time.process_time() - began) / entries * 1e3:.2f} ms of CPU an entry"
    )
    store.close()


def leave(folder: Path) -> None:
    """Start, and stop in good order."""
    core = TransactionLog(Store(folder / "mux.sqlite"), None, TTL)
    core.leave()
    core.store.close()


def main() -> None:
    parser = flags(__doc__, entries=200_000, live=1000)
    parser.add_argument("--state", type=Path, required=True, help="a new folder")
    args = parser.parse_args()
    args.state.mkdir(parents=True)
    fill(args.state, args.entries, args.live)
    report("after a kill", args.state)
    leave(args.state)
    report("after an orderly stop", args.state)
    report("all of it (--verify)", args.state, verified=True)


if __name__ == "__main__":
    main()
