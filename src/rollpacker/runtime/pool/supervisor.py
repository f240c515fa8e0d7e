"""The processes of a run: who lives, who is being started, and who has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from rollpacker.runtime.cluster.nodes import Nodes
from rollpacker.runtime.ipc.failure_detector import Silence
from rollpacker.runtime.ipc.link import Host
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.messages.faults import Fault, WorkerError, spawn
from rollpacker.runtime.worker.worker import WorkerSpec

_CLOSE_S = 3.0
"""In which workers should have left; what they do then is of no use to anybody."""
_GONE_S = 60.0
"""In which one that was killed is gone, and its device's memory with it."""


class Supervisor:
    """Workers by number, which are started together, live, and end one by one.

    Args:
        machines: start them.
        heartbeat_s: seconds between two signs of life.
        hear: called with the reports of one that lives, or is being started.
        lose: called with one that lived and is gone, and how; it is not ``live`` any more.
        note: called with what the user should know, once where several say the same.
    """

    def __init__(
        self,
        machines: Nodes,
        heartbeat_s: float,
        hear: Callable[[int, msg.Report], None],
        lose: Callable[[int, str], None],
        note: Callable[[str], None],
    ) -> None:
        self._machines = machines
        self._hear = hear
        self._lose = lose
        self._note = note
        self._noted: set[str] = set()
        self._loop = asyncio.get_running_loop()
        self._silence = Silence(heartbeat_s)
        self._watching: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[None]] = set()
        self._hosts: dict[int, Host] = {}
        self._coming: set[int] = set()
        self._starting: set[int] = set()
        self._answers: dict[int, asyncio.Future[msg.Report]] = {}
        self._reasons: dict[int, str] = {}
        self._spoiled = ""
        self.live: set[int] = set()
        """Those that take part."""
        self.frozen = False
        """They stand still, and are not expected to give signs of life."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all on this machine that live or are being started."""
        pids = (self._hosts[number].pid for number in sorted(self.live | self._coming))
        return tuple(pid for pid in pids if pid)

    async def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> list[msg.Report]:
        """Start workers, given by node, and wait for their models; ``admit`` lets them take part.

        If one of them fails none is left. Raises ``ValueError`` for the user's mistakes (a wrong
        model), ``WorkerError`` otherwise.
        """
        if not self._coming:
            self._spoiled = ""
        ranks = [spec.rank for those in specs.values() for spec in those]
        before = [self._hosts[rank] for rank in ranks if rank in self._hosts]
        for host in before:  # whatever is left of it
            host.kill()
        # Its device's memory goes with it.
        await asyncio.gather(*(host.end(_GONE_S) for host in before))
        started = self._machines.start(specs)
        for number, host in started.items():
            self._hosts[number] = host
            self._reasons.pop(number, None)
            self._silence.begin(number)
            self._listen_to(number, host)
        self._coming |= {*started}
        self._starting |= {*started}
        if self._watching is None:
            self._watching = spawn(self._watch())
        try:
            return await asyncio.gather(*self.expect([*started]))
        except BaseException:
            self.dismiss(self._coming, "another one of those that were started with it has failed")
            raise

    def admit(self) -> set[int]:
        """Those that were started take part from now on; which ones.

        Raises ``WorkerError`` when one of them has gone meanwhile: then none is left.
        """
        if self._spoiled:
            raise WorkerError(self._spoiled)
        coming, self._coming = self._coming, set()
        self.live |= coming
        return coming

    def _listen_to(self, number: int, host: Host) -> None:
        host.link.open(
            self._loop,
            lambda report: self._dispatch(number, report),
            lambda: self._gone(number, host),
            lambda: self._silence.sign(number),
        )

    def send(self, number: int, command: msg.Command) -> None:
        """To one that may be gone."""
        if number in self.live:
            self._hosts[number].link.send(command)

    def send_encoded(self, number: int, data: memoryview) -> None:
        """The same, of what ``wire.encode`` made."""
        if number in self.live:
            self._hosts[number].link.send_encoded(data)

    def expect(self, workers: Sequence[int]) -> list[asyncio.Future[msg.Report]]:
        """The answer of each, ``Ready`` or ``Done``, which it gives once."""
        answers = {worker: self._loop.create_future() for worker in workers}
        self._answers.update(answers)
        return [*answers.values()]

    async def ask(
        self, workers: Sequence[int], command: msg.Offload | msg.Onload
    ) -> dict[int, msg.Done]:
        """Answers of those that live; of the others whoever listens is told."""
        asked = [worker for worker in workers if worker in self.live]
        answers = self.expect(asked)
        for worker in asked:
            self._hosts[worker].link.send(command)
        found = await asyncio.gather(*answers, return_exceptions=True)
        pairs = zip(asked, found, strict=True)
        return {worker: done for worker, done in pairs if isinstance(done, msg.Done)}

    def put_down(self, number: int, why: str) -> None:
        """Its link closes, and that is told."""
        if number in self.live | self._coming:
            self._reasons[number] = why
            self._hosts[number].kill()

    def dismiss(self, numbers: Collection[int], why: str) -> None:
        """End some at once, and with one of those that were started all of these.

        Nobody is told but those who wait for their answers.
        """
        chosen = {*numbers}
        if chosen & self._coming:
            self._spoiled = why
            chosen |= self._coming
        for number in sorted(chosen & (self.live | self._coming)):
            self._leave(number).kill()
            answer = self._answers.pop(number, None)
            if answer is not None and not answer.done():  # cancelled: nobody waits any more
                answer.set_exception(WorkerError(why))

    def _dispatch(self, number: int, report: msg.Report) -> None:
        match report:
            case msg.Ready() | msg.Done():
                self._starting.discard(number)
                answer = self._answers.pop(number, None)
                if answer is not None and not answer.done():  # cancelled: nobody waits any more
                    answer.set_result(report)
            case msg.Died():
                self._forget(number, report.fault.text, report.fault)
            case msg.Beat():
                self._silence.work(number, report.at, report.done, report.longest_s)
            case msg.Noted():
                if report.text not in self._noted:
                    self._noted.add(report.text)
                    self._note(report.text)
            case _:
                self._hear(number, report)

    async def _watch(self) -> None:
        """Kill whoever has stopped to give signs of life, or hangs: its link closes, and that is
        told."""
        while True:
            await asyncio.sleep(self._silence.every_s)
            if self.frozen:
                for number in self.live | self._coming:
                    self._silence.begin(number)
                continue
            lost = self._silence.look(self.live | self._coming, self._starting)
            for number, why in lost.items():
                self.put_down(number, why)

    def _gone(self, number: int, host: Host) -> None:
        """Its link has closed; how it ended may take some seconds to see."""
        if number in self._reasons:
            self._forget(number, self._reasons[number])
            return
        asking = spawn(self._ask_end(number, host))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)

    async def _ask_end(self, number: int, host: Host) -> None:
        end = await host.end()
        if self._hosts[number] is host and number in self.live | self._coming:
            self._forget(number, self._reasons.get(number, end))

    def _forget(self, number: int, why: str, fault: Fault | None = None) -> None:
        lived = number in self.live
        self._leave(number)
        text = f"worker {number} died: {why}"
        user = fault.error() if fault is not None and fault.kind == "user" else None
        waiting = self._answers.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_exception(user or WorkerError(text))
        if lived and user is not None:
            raise user  # others in its place would come to the same: whatever is waited for ends
        if lived:
            self._lose(number, text)
        else:
            self._spoiled = text
            self.dismiss(self._coming, text)

    def _leave(self, number: int) -> Host:
        """Listen to a worker no more."""
        self.live.discard(number)
        self._coming.discard(number)
        self._starting.discard(number)
        host = self._hosts[number]
        host.link.close()
        return host

    def close(self) -> None:
        """Stop all workers; those that do not listen are killed."""
        for task in self._asking | ({self._watching} if self._watching else set()):
            task.cancel()
        try:
            for number in self.live | self._coming:
                self._hosts[number].link.send(msg.Stop())
                self._hosts[number].link.close()
            until = time.monotonic() + _CLOSE_S
            for host in self._hosts.values():
                host.wait(max(0.0, until - time.monotonic()))
        finally:
            for host in self._hosts.values():
                host.kill()
            for host in self._hosts.values():
                host.wait(_GONE_S)
        self.live.clear()
        self._coming.clear()
