"""The tool ``python``: runs the model's code in the sandbox."""

from __future__ import annotations

import asyncio
import os
import threading

from rollpacker.env.base import EpisodeError
from rollpacker.sandbox import Limits, Sandbox, SandboxUnavailableError, StdinTest
from rollpacker.sandbox.grading.decode import BadResultError, read_report
from rollpacker.sandbox.grading.grade import encode_job
from rollpacker.sandbox.running import Execution, Stop

_MOST_AT_ONCE = 16
_SHARE = 12.0
"""A step's time limit over a program's CPU seconds. A busy machine may stretch a program to ten
times its CPU seconds, and it must still end before the episode does."""
_LONGEST = 8000  # characters of output that the model sees
_ATTEMPTS = 2
_ONE_STREAM = """import sys
sys.stderr = sys.stdout
exec(compile({!r}, "<program>", "exec", dont_inherit=True), globals())
"""
"""Error output appears where the program writes it, as in a terminal."""
_ENDS = {
    "tle_cpu": "the program ran too long and was stopped",
    "tle_idle": "the program waited too long and was stopped",
}


class Interpreter(Sandbox):
    """A sandbox that returns a program's output rather than a verdict."""

    def output(self, program: str, timeout_s: float, stop: Stop) -> str:
        """Return a program's output, and its failure if it failed. Raises
        ``SandboxUnavailableError``, and ``StoppedError`` if ``stop`` returns true."""
        job, stdin = encode_job(_ONE_STREAM.format(program), StdinTest(stdin="", stdout=""))
        for _ in range(_ATTEMPTS):
            execution = self._execute(job, stdin, timeout_s, stop)
            if execution is not None and execution.end not in ("starved", "no_start"):
                return shown(execution)
        raise SandboxUnavailableError("the sandbox did not run the program")


class CodeTool:
    """Runs programs for one process, isolated from each other. Raises ``ValueError`` if the sandbox
    does not work on this machine."""

    def __init__(self, step_timeout_s: float) -> None:
        self._cpu_s = step_timeout_s / _SHARE
        try:
            self._interpreter = Interpreter(
                zygotes=min(_MOST_AT_ONCE, os.cpu_count() or 1),
                limits=Limits(idle_s=9 * self._cpu_s),
            )
        except SandboxUnavailableError as error:
            raise ValueError(f"environment.path: tool 'python': {error}") from error

    async def python(self, code: str) -> str:
        """Run Python code and return what it prints. Nothing is kept from one call to the next.

        Args:
            code: a complete program.
        """
        stopped = threading.Event()
        output = self._interpreter.output
        try:
            return await asyncio.to_thread(output, code, self._cpu_s, stopped.is_set)
        except SandboxUnavailableError as error:
            raise EpisodeError(f"tool 'python': {error}") from error
        finally:
            stopped.set()  # ends a program whose episode has timed out

    def close(self) -> None:
        self._interpreter.close()


def shown(execution: Execution) -> str:
    """Return an execution as the model sees it: the output, cut in its middle, and the error."""
    parts = [_decoded(execution.stdout), _error(execution)]
    if execution.flooded:
        parts.append("Error: the output was too long and was cut")
    return "\n".join(part for part in parts if part) or "(no output)"


def _decoded(output: bytes) -> str:
    text = output.decode("utf-8", "replace").rstrip("\n")
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"


def _error(execution: Execution) -> str:
    if execution.end in _ENDS:
        return f"Error: {_ENDS[execution.end]}"
    if execution.end == "signal":
        return f"Error: the program was killed by signal {execution.code}"
    if execution.code == 0:
        return ""
    try:
        error = read_report(execution.result).get("error")
    except BadResultError:
        error = None
    return f"Error: {error}" if error else f"Error: exit status {execution.code}"
