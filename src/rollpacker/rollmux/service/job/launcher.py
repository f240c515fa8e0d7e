"""The nodes of a job that RollMux's agents have started: one process each comes to its driver."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from rollpacker.config import RunConfig
from rollpacker.rollmux.service.client.client import MuxClient
from rollpacker.rollmux.service.client.link import MuxError, UnreachableError
from rollpacker.rollmux.service.job.joining import connect, job_id
from rollpacker.runtime.cluster.agent_process import start_agent

_AGAIN_S = 5.0
"""The daemon forgets where a gate is when it starts again."""
_SOCKET_S = 10.0
_LEAVING_S = 5.0


class MuxLauncher:
    """Tells the job's other nodes, through the daemon, where the driver's gate is.

    The driver's own node has an agent that it starts itself; on the others RollMux's agents have
    started one (``Program.members``), and with it they are gone: the attempt ends then.

    Args:
        config: the run's, of a job that was submitted.
        client: of the daemon; made from the configuration when None.
    """

    def __init__(self, config: RunConfig, client: MuxClient | None = None) -> None:
        self._url = config.mux.url
        self._client = client or connect(config.mux)
        self._job = job_id(config)
        self._attempt = 0
        self._own: subprocess.Popen[bytes] | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def host(self) -> str:
        """This machine's address on the way to the daemon, by which the other nodes reach it."""
        url = urlsplit(self._url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            with socket.create_connection((url.hostname or "", port), _SOCKET_S) as way:
                return way.getsockname()[0]
        except OSError as error:
            raise ValueError(f"mux.url={self._url}: {error}") from error

    async def launch(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        """Let an agent come from each of the job's nodes, by these names.

        Raises ``ValueError`` where the job has another number of nodes.
        """
        program = (await asyncio.to_thread(self._client.job, self._job))["program"]
        assert program is not None
        attempt = program["attempts"][-1]
        nodes, self._attempt = 1 + len(attempt["members"]), attempt["number"]
        if nodes != len(names):
            raise ValueError(
                f"devices.nodes={len(names)}, but job {self._job} has {nodes} nodes: submit it "
                "again"
            )
        self._own = start_agent(*address, key.hex(), names[0])
        await asyncio.to_thread(self._tell, address, key, names)
        self._telling = asyncio.create_task(self._tell_again(address, key, names))

    def _tell(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        self._client.open_gate(self._job, self._attempt, *address, key, names)

    async def _tell_again(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            with suppress(MuxError, UnreachableError):
                await asyncio.to_thread(self._tell, address, key, names)

    async def replace(self, address: tuple[str, int], key: bytes, number: int, name: str) -> None:
        """Never: an attempt has all of its nodes or ends. Raises ``ValueError``."""
        del address, key, name
        raise ValueError(f"node {number} is gone: the job's program starts again as a whole")

    def close(self) -> None:
        """End the agent of the driver's own node; the others end with the attempt."""
        if self._telling is not None:
            self._telling.cancel()
        if self._own is not None:
            assert self._own.stdin is not None
            self._own.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._own.wait(_LEAVING_S)
            self._own.kill()
            self._own.wait()
            self._own = None
