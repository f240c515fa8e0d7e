"""Runs programs in a service elsewhere, over the HTTP of SandboxFusion (bytedance, Apache-2.0).

The service is responsible for the isolation. Verdicts are still computed here: expected values are
sent only in the text of asserts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit

from rollpacker.sandbox.base import ProgramRunner
from rollpacker.sandbox.grading.grade import job_of, judge
from rollpacker.sandbox.running import Execution, Stop
from rollpacker.sandbox.types import (
    Limits,
    SandboxUnavailableError,
    StdinTest,
    StoppedError,
    Test,
    TestResult,
)

_GUEST = Path(__file__).parent / "guest"
_SOURCES = {
    name: (_GUEST / f"{name}.py") for name in ("values", "prelude", "perform", "pytests", "testrun")
}
_COMPILE_S = 10.0
_BUSY = (408, 429)
_CHUNK = 1 << 16
_ASK_S = 0.2
# The program can find the mark and forge a report, so such verdicts are forgeable.
_HARNESS = """
import json, os, sys, types
modules = {}
sys.modules["guest"] = types.ModuleType("guest")
for name, source in SOURCES.items():
    modules[name] = sys.modules["guest." + name] = types.ModuleType("guest." + name)
    modules[name].__package__ = "guest"
    exec(compile(source, "<harness>", "exec", dont_inherit=True), vars(modules[name]))
sys.modules["pytest"] = modules["pytests"]
job = json.loads(sys.stdin.read())
plain = modules["prelude"].install()
status, outcome = 0, {}
try:
    run_tests, encode = modules["testrun"].run_tests, modules["values"].encode
    outcome = modules["perform"].perform(job, run_tests, encode, plain)
except SystemExit as stop:
    status = 0 if stop.code is None else stop.code & 255 if isinstance(stop.code, int) else 1
except BaseException as error:
    status, outcome = 1, {"error": (type(error).__name__ + ": " + str(error))[:300]}
try:
    sys.stdout.flush()
except BaseException:
    status = status or 1
report = memoryview(("\\n" + job["mark"] + json.dumps(outcome)).encode())
while report:
    report = report[os.write(1, report):]
os._exit(status)
"""


class _Busy(Exception):  # noqa: N818
    """The service did not serve this time and may the next."""


class _Flooded(Exception):  # noqa: N818
    """The program wrote more than is read."""


class RemoteSandbox(ProgramRunner[Literal["remote"]]):
    """Runs programs like ``Sandbox``, in a SandboxFusion-compatible service.

    Its times and timeouts are wall seconds of the service, so a busy service fails slow programs.
    Tests of calls and asserts are ``forgeable``, because the program's process reports them.
    ``stop`` ends the wait for a reply, but the service may run the program to its timeout. A
    verdict is ``infra`` if the service cannot be used now.

    Args:
        url: of the service, such as ``http://localhost:8080``. ``/run_code`` is added.
        headers: sent with every request, such as ``Authorization``.
        at_once: requests that are open at a time.
        start_s: added to every timeout, for the start of an interpreter.
        retries: of a request that the service did not serve (5xx, 408, 429, no connection).
        wait_s: before the first retry. Doubled for each further one.
        limits: ``memory_mb`` is requested, ``output_mb`` bounds the reply that is read.

    Raises:
        ValueError: an URL that is not http or https, or a number out of range.
        SandboxUnavailableError: ``run``: the service refuses requests (4xx).
    """

    level = "remote"

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        at_once: int = 8,
        start_s: float = 1.0,
        retries: int = 2,
        wait_s: float = 0.5,
        limits: Limits | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a remote sandbox needs an http or https URL, got '{url}'")
        if at_once < 1 or retries < 0 or start_s < 0 or wait_s < 0:
            raise ValueError(
                "a remote sandbox needs at_once >= 1 and retries, start_s and wait_s >= 0, got "
                f"{at_once}, {retries}, {start_s} and {wait_s}"
            )
        self.limits = limits or Limits()
        secure = parts.scheme == "https"
        self._connection = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._address = (parts.hostname, parts.port)
        self._path = parts.path.rstrip("/").removesuffix("/run_code") + "/run_code"
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._open = threading.BoundedSemaphore(at_once)
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="remote-sandbox")
        self._start_s = start_s
        self._retries = retries
        self._wait_s = wait_s
        sources = {name: path.read_text(encoding="utf-8") for name, path in _SOURCES.items()}
        self._harness = f"SOURCES = {sources!r}\n{_HARNESS}"

    def _run(
        self,
        program: str,
        test: Test,
        timeout_s: float,
        stop: Stop | None,
        float_tolerance: float | None,
    ) -> TestResult:
        job, stdin = job_of(program, test)
        mark = ""
        if not isinstance(test, StdinTest):
            mark = secrets.token_hex(16)
            stdin = json.dumps({**job, "mark": mark}).encode()
            program = self._harness
        timeout_s += self._start_s
        body = json.dumps(
            {
                "code": program,
                "language": "python",
                "stdin": stdin.decode("utf-8", "surrogatepass"),
                "run_timeout": timeout_s,
                "compile_timeout": _COMPILE_S,
                "memory_limit_MB": self.limits.memory_mb,
            }
        ).encode()
        problem = ""
        for turn in range(1 + self._retries):
            if turn:
                time.sleep(self._wait_s * 2 ** (turn - 1))
            if stop is not None and stop():
                raise StoppedError
            try:
                with self._open:
                    reply = self._post(body, timeout_s + _COMPILE_S, stop)
                run = _execution(reply, mark, self.limits.output_mb << 20)
                return judge(test, run, float_tolerance)
            except _Flooded as error:
                detail = f"output limit: {error}"
                return TestResult(verdict="fail", cpu_s=0.0, wall_s=0.0, detail=detail)
            except _Busy as error:
                problem = str(error)
        return TestResult(verdict="infra", cpu_s=0.0, wall_s=0.0, detail=problem[:300])

    def _post(self, body: bytes, longest_s: float, stop: Stop | None) -> Any:
        deadline = time.monotonic() + 2.0 * longest_s
        connection = self._connection(*self._address, timeout=2.0 * longest_s)
        # In a thread: connecting, TLS and reading block, and ``stop`` must be asked meanwhile.
        exchange = self._threads.submit(self._exchange, connection, body, deadline)
        try:
            status, data = _result(exchange, deadline, stop)
        except (OSError, http.client.HTTPException) as error:
            raise _Busy(f"{type(error).__name__}: {error}") from error
        finally:
            _hang_up(connection)
        if status >= 500 or status in _BUSY:
            raise _Busy(f"HTTP {status}")
        if status != 200:
            self._refused(status, data)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise _Busy("its reply is not JSON") from error

    def _exchange(
        self, connection: http.client.HTTPConnection, body: bytes, deadline: float
    ) -> tuple[int, bytes]:
        connection.request("POST", self._path, body, self._headers)
        response = connection.getresponse()
        return response.status, self._read(response, connection, deadline)

    def _read(
        self,
        response: http.client.HTTPResponse,
        connection: http.client.HTTPConnection,
        deadline: float,
    ) -> bytes:
        # JSON takes up to six bytes for one.
        most = 12 * (self.limits.output_mb << 20) + _CHUNK
        data = bytearray()
        while chunk := response.read1(_CHUNK):
            data += chunk
            left = deadline - time.monotonic()
            if len(data) > most:
                # Only a program's output can make a valid reply so long.
                raise (_Flooded if response.status == 200 else _Busy)("the reply is too large")
            if left <= 0:
                raise _Busy("its reply takes too long")
            if connection.sock is not None:
                connection.sock.settimeout(left)
        return bytes(data)

    def _refused(self, status: int, data: bytes) -> NoReturn:
        host, port = self._address
        where = f"{host}:{port}{self._path}" if port else f"{host}{self._path}"
        said = " ".join(data[:200].decode("utf-8", "replace").split())
        raise SandboxUnavailableError(
            f"the remote sandbox at {where} refuses requests with HTTP {status}: {said}"
        )

    def _is_forgeable(self, test: Test) -> bool:
        return not isinstance(test, StdinTest)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _result(
    exchange: Future[tuple[int, bytes]], deadline: float, stop: Stop | None
) -> tuple[int, bytes]:
    while not wait([exchange], _ASK_S).done:
        if stop is not None and stop():
            raise StoppedError
        if time.monotonic() > deadline:
            raise _Busy("it does not reply")
    return exchange.result()


def _hang_up(connection: http.client.HTTPConnection) -> None:
    # Shut the socket down first, to wake the thread that may be reading.
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def _execution(reply: Any, mark: str, output: int) -> Execution:
    # ``output``: the most bytes that a program may write. Raises ``_Busy`` if the service is at
    # fault.
    run = reply.get("run_result") if isinstance(reply, dict) else None
    if not isinstance(run, dict) or reply.get("status") == "SandboxError":
        message = reply.get("message") if isinstance(reply, dict) else None
        raise _Busy(f"the service failed: {str(message or 'no result')[:200]}")
    status, code, seconds = run.get("status"), run.get("return_code"), run.get("execution_time")
    if status == "Finished" and not isinstance(code, int):
        raise _Busy("its reply has no return code")
    if status not in ("Finished", "TimeLimitExceeded"):
        raise _Busy(f"the service failed: status {status!r:.60}")
    stdout = str(run.get("stdout") or "").encode("utf-8", "replace")
    _, found, report = stdout.rpartition(b"\n" + mark.encode())
    wall_s = float(seconds) if isinstance(seconds, int | float) else 0.0
    return Execution(
        end="exit" if status == "Finished" else "tle_idle",
        code=abs(code) if isinstance(code, int) else 0,
        cpu_s=wall_s,
        wall_s=wall_s,
        stdout=stdout,
        result=report if mark and found else b"",
        stderr=b"",
        flooded=len(stdout) >= output,
    )
