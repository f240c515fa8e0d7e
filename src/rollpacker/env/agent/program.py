"""One run of a program: started, read from, ended with all processes that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from rollpacker.env.agent.reaper import Reaper
from rollpacker.processes.children import kill_child

_KEPT = 64 << 10  # bytes
_READ = 64 << 10


class OutputTail:
    """The end of a program's output. All output is read, so that the program never waits. ``ended``
    is set at the end of the output."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.text = b""
        self.ended = asyncio.Event()
        self._pipe = pipe
        self._loop = asyncio.get_running_loop()
        os.set_blocking(pipe.fileno(), False)
        self._loop.add_reader(pipe.fileno(), self._read)

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()
            self.ended.set()

    def _read(self) -> None:
        try:
            data = os.read(self._pipe.fileno(), _READ)
        except BlockingIOError:
            return
        self.text = (self.text + data)[-_KEPT:]
        if not data:
            self.close()


_SOONEST_LOOK_S = 0.001
_LATEST_LOOK_S = 0.25
"""Between two checks whether the program is over. Usually it is when its output ends."""
_OUTPUT_S = 0.5  # seconds for reading on after a program died, if others hold its output open
_TERM_S = 0.5  # from SIGTERM to SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a program ended.

    Args:
        code: exit code, or minus the signal that killed it.
        how: in words, such as "exited with code 1".
        stdout: the end of its output. ``stderr`` likewise.
        result: the return value of a function that was called in a program's place.
    """

    code: int
    how: str
    stdout: bytes
    stderr: bytes
    result: Any = None


class AgentProgram:
    """A program in a process group of its own.

    Make it in an event loop. ``environment`` has all of its variables, and ``stdin`` all of its
    input. ``ended`` is a task with the ``Ending``, done when no process of it is left. Raises
    ``OSError`` if it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes,
        environment: Mapping[str, str],
        reaper: Reaper,
    ) -> None:
        with tempfile.TemporaryFile() as file:  # a pipe would have to be fed
            file.write(stdin)
            file.seek(0)
            self._popen = subprocess.Popen(
                argv,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
            )
        self._reaper = reaper
        self._reaper.watch(self._popen.pid)
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self._out = OutputTail(self._popen.stdout)
        self._err = OutputTail(self._popen.stderr)
        self.ended = asyncio.get_running_loop().create_task(self._live())

    async def stop(self, patience: float) -> None:
        """End it: it may end by itself for so many seconds, then gets SIGTERM, then SIGKILL."""
        try:
            if not await self._over(patience):
                self._signal(signal.SIGTERM)
                await self._over(_TERM_S)
        finally:
            self._signal(signal.SIGKILL)
        await self._over(None)

    async def _over(self, seconds: float | None) -> bool:
        await asyncio.wait({self.ended}, timeout=seconds)
        return self.ended.done()

    async def _live(self) -> Ending:
        try:
            await self._exit()
        finally:
            # Reap it only now: until then no other process has its pid.
            how = kill_child(self._popen)
            self._reaper.forget(self._popen.pid)
            try:
                await self._outputs_end(_OUTPUT_S)
            finally:
                self._out.close()
                self._err.close()
        code = self._popen.returncode
        return Ending(code=code, how=how, stdout=self._out.text, stderr=self._err.text)

    async def _exit(self) -> None:
        pid = self._popen.pid
        while not _has_exited(pid) and not await self._outputs_end(_LATEST_LOOK_S):
            pass
        pause = _SOONEST_LOOK_S
        while not _has_exited(pid):
            await asyncio.sleep(pause)
            pause = min(2.0 * pause, _LATEST_LOOK_S)

    async def _outputs_end(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._out.ended.wait()
                await self._err.ended.wait()
                return True
        return False

    def _signal(self, number: int) -> None:
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, number)


def _has_exited(pid: int) -> bool:
    # This does not reap the child.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
