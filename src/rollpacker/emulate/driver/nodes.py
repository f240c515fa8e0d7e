"""The machines of an emulated run, whichever they are: what is said to the workers on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rollpacker.emulate.agenda import Lateness
from rollpacker.emulate.driver.draws import WorkloadDraws
from rollpacker.emulate.messages import Punctual, forced
from rollpacker.runtime.cluster.nodes import Node, Nodes
from rollpacker.runtime.ipc.channel import DriverChannel, Host
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.worker import WorkerSpec


class EmulatedNodes:
    """Machines that start emulated workers.

    Args:
        nodes: the machines.
        draws: of the run.
        late: takes how late the actions of each process were.
    """

    def __init__(self, nodes: Nodes, draws: WorkloadDraws, late: dict[int, Lateness]) -> None:
        self._nodes = nodes
        self._draws = draws
        self._late = late

    async def gather(self) -> Sequence[Node]:
        """Wait for all of them."""
        return await self._nodes.gather()

    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        """Start workers, whose requests will say what they stand for."""
        hosts = self._nodes.start(specs)
        return {
            number: EmulatedHost(host, _Told(host.link, self._draws, self._late))
            for number, host in hosts.items()
        }

    @property
    def lost(self) -> Collection[int]:
        """Those that are gone."""
        return self._nodes.lost

    def regain(self) -> Mapping[int, Node]:
        """Begin to bring them back."""
        return self._nodes.regain()

    def fence(self, stop_at: float | None) -> None:
        """They share no devices with anybody."""

    def store(self) -> str:
        """Nobody meets."""
        return "emulated/"

    def close(self) -> None:
        """Nobody is needed any more."""
        self._nodes.close()


class EmulatedHost:
    """What an emulated worker runs in.

    Args:
        host: that, as its node has started it.
        link: to the worker.
    """

    def __init__(self, host: Host, link: DriverChannel) -> None:
        self.link = link
        self._host = host

    @property
    def pid(self) -> int:
        """Its process, which has others too."""
        return self._host.pid

    def wait(self, seconds: float) -> None:
        """Give it so long to end by itself."""
        self._host.wait(seconds)

    def kill(self) -> None:
        """End it at once."""
        self._host.kill()

    async def end(self, seconds: float = 5.0) -> str:
        """How it ended, in words."""
        return await self._host.end(seconds)


class _Told:
    """The driver's end of a channel to an emulated worker, which is told what requests stand for,
    and tells how late it was."""

    def __init__(
        self, line: DriverChannel, draws: WorkloadDraws, late: dict[int, Lateness]
    ) -> None:
        self._line = line
        self._draws = draws
        self._late = late
        self.send_encoded = line.send_encoded
        self.close = line.close

    def send(self, message: Any) -> None:
        """Send a message; requests with what they stand for."""
        if isinstance(message, msg.LoadWeights):
            self._draws.begin(message.version)
        elif isinstance(message, msg.Submit):
            message = forced(message, tuple(self._draws.of(r.group) for r in message.requests))
        self._line.send(message)

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        hear: Callable[[Any], None],
        gone: Callable[[], None],
        sign: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to listen; what is said of lateness is noted on the way."""

        def noted(report: Any) -> None:
            if isinstance(report, Punctual):
                self._late[report.process] = report.lateness
            hear(report)

        self._line.open(loop, noted, gone, sign)
