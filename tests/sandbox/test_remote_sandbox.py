import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from case_files import read_table
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest, GradingError
from rollpacker.reward.code import CodeReward
from rollpacker.sandbox import (
    AssertTest,
    CallTest,
    Level,
    Limits,
    SandboxUnavailableError,
    StdinTest,
    StoppedError,
)
from rollpacker.sandbox.grading.grade import encode_job, job_of
from rollpacker.sandbox.remote import RemoteSandbox
from rollpacker.sandbox.running import Zygote, execute

ADD = "def add(a, b): return a + b\n"
CALL = CallTest(call="add", args=[1, 2], expected=3)
SUM = "print(sum(map(int, input().split())))\n"
ADDED = AssertTest(asserts="assert add(1, 2) == 3")
STDIN = StdinTest(stdin="1 2\n", stdout="3\n")


class Service(ThreadingHTTPServer):
    """SandboxFusion's interface; programs really run, in a zygote of the sandbox."""

    daemon_threads = True

    def __init__(self, level: Level) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.zygote = Zygote(level)
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.troubles: list[Any] = []
        """Taken one a request, before anything runs: an HTTP status, or text to reply with."""

    def run_code(self, request: dict[str, Any]) -> dict[str, Any]:
        job, stdin = encode_job(request["code"], StdinTest(stdin=request["stdin"], stdout=""))
        with self.lock:
            done = execute(self.zygote, job, stdin, Limits(), request["run_timeout"])
        late = done.end.startswith("tle")
        result = {
            "status": "TimeLimitExceeded" if late else "Finished",
            "execution_time": done.wall_s,
            "return_code": None if late else done.code,
            "stdout": done.stdout.decode("utf-8", "replace"),
            "stderr": done.stderr.decode("utf-8", "replace"),
        }
        status = "Failed" if late or done.code else "Success"
        return {"status": status, "message": "", "compile_result": None, "run_result": result}


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        assert self.path == "/run_code"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.tokens.append(self.headers["Authorization"])
        trouble = self.server.troubles.pop(0) if self.server.troubles else 200
        if trouble == "hang up":
            self.close_connection = True
            return
        status = trouble if isinstance(trouble, int) else 200
        ready = isinstance(trouble, int)
        body = (
            json.dumps(self.server.run_code(request)) if status == 200 and ready else str(trouble)
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service(level: Level) -> Iterator[Service]:
    with Service(level) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()
        made.zygote.close()


def remote(service: Service, **options: Any) -> RemoteSandbox:
    return RemoteSandbox(f"http://127.0.0.1:{service.server_port}", wait_s=0.01, **options)


@pytest.mark.parametrize(
    ("program", "test", "verdict"),
    [
        (SUM, STDIN, "pass"),
        ("print(4)", STDIN, "fail"),
        ("print(1 / 0)", STDIN, "crash"),
        (ADD, CALL, "pass"),
        ("print('hello', end='')\n" + ADD, CALL, "pass"),
        ("class Solution:\n    def add(self, a, b): return a + b", CALL, "pass"),
        ("def add(a, b): return a - b", CALL, "fail"),
        ("def add(a, b): return True", CallTest(call="add", args=[1, 0], expected=1), "fail"),
        ("def add(a, b): return object()", CALL, "crash"),
        ("def other(): pass", CALL, "crash"),
        ("import sys; sys.exit(0)", CALL, "fail"),
        ("import sys; sys.exit(3)", CALL, "crash"),
        ("import os; os._exit(0)", CALL, "fail"),
        ("def add(a: List[int], b): return a - b", replace(CALL, args={"b": 1, "a": 4}), "pass"),
        ("def add(a): a.reverse()", replace(CALL, args=[[3]], expected=[3], in_place=True), "pass"),
        ("    return a + b", replace(ADDED, prompt="def add(a, b):\n", stub="add"), "pass"),
        (ADD, AssertTest(asserts="from solution import add\nassert add(1, 2) == 3"), "pass"),
        (ADD, AssertTest(asserts="def test_a():\n    assert add(1, 2) == 4"), "fail"),
        (
            ADD,
            AssertTest(
                asserts="import pytest\ndef test_a():\n"
                "    with pytest.raises(TypeError): add(1, None)"
            ),
            "pass",
        ),
    ],
)
def test_verdicts_are_those_of_the_sandbox(
    service: Service, sandbox: Any, program: str, test: Any, verdict: str
) -> None:
    found = remote(service).run(program, [test], 2.0)
    assert found.verdict == verdict
    assert found.level == "remote"
    assert found.forgeable == (not isinstance(test, StdinTest))
    assert found.tests[0].wall_s > 0
    assert sandbox.run(program, [test], 2.0).verdict == verdict


@pytest.mark.parametrize(
    ("program", "test", "reported"),
    [
        ("def add(a: List, b): return reduce(gcd, a, b)", replace(CALL, args=[[4], 6]), "value"),
        ("def f(): pass", CALL, "error"),
        ("def f(): pass", ADDED, "error"),
        (ADD, ADDED, "held value"),
    ],
)
def test_the_harness_in_an_interpreter_of_its_own(
    program: str, test: CallTest | AssertTest, reported: str
) -> None:
    harness = RemoteSandbox("http://localhost")._harness
    job = json.dumps({**job_of(program, test)[0], "mark": "mark"})
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", harness], input=job, capture_output=True, text=True
    )
    assert list(json.loads(done.stdout.removeprefix("\nmark"))) == reported.split()


def test_what_is_expected_stays_here(service: Service) -> None:
    tests = [
        CallTest(call="add", args=[1, 2], expected="a secret"),
        StdinTest(stdin="1 2\n", stdout="a secret"),
    ]
    assert remote(service).run(ADD, tests, 2.0).verdict == "fail"
    assert "a secret" not in json.dumps(service.requests)


def test_the_request(service: Service) -> None:
    made = remote(service, headers={"Authorization": "Bearer x"}, start_s=0.5)
    assert made.run(SUM, [STDIN], [1.5]).verdict == "pass"
    assert service.tokens == ["Bearer x"]
    assert service.requests == [
        {
            "code": SUM,
            "language": "python",
            "stdin": "1 2\n",
            "run_timeout": 2.0,
            "compile_timeout": 10.0,
            "memory_limit_MB": 1024,
        }
    ]


def test_a_program_that_does_not_end(service: Service) -> None:
    found = remote(service, start_s=0.1).run("while True: pass", [STDIN, STDIN], 0.2)
    assert [test.verdict for test in found.tests] == ["tle_idle", "tle_idle"]


def test_stopping_early(service: Service) -> None:
    found = remote(service).run("print(4)", [STDIN, STDIN], 1.0, stop_early=True)
    assert len(found.tests) == len(service.requests) == 1


@pytest.mark.parametrize(
    "trouble", [*read_table(__file__, "test_trouble_passes_or_is_infra"), "[" * 100_000]
)
def test_trouble_passes_or_is_infra(service: Service, trouble: Any) -> None:
    service.troubles = [trouble, trouble]
    assert remote(service).run(SUM, [STDIN], 1.0).verdict == "pass"
    assert len(service.requests) == 3
    service.troubles = [trouble] * 3
    found = remote(service).run(SUM, [STDIN], 1.0)
    assert found.verdict == "infra"
    assert found.tests[0].detail


def test_nobody_there_is_infra() -> None:
    found = RemoteSandbox("http://127.0.0.1:9", retries=1, wait_s=0.01).run(SUM, [STDIN], 1.0)
    assert found.verdict == "infra"
    assert "ConnectionRefusedError" in found.tests[0].detail


@pytest.mark.parametrize("status", [400, 404, 422])
def test_refused_requests_are_the_users_to_mend(service: Service, status: int) -> None:
    service.troubles = [status]
    with pytest.raises(SandboxUnavailableError, match=f"refuses requests with HTTP {status}"):
        remote(service).run(SUM, [STDIN], 1.0)
    assert len(service.requests) == 1


def test_a_reply_that_is_too_large_is_not_read(service: Service) -> None:
    service.troubles = ["x" * (30 << 20)]
    made = remote(service, retries=0, limits=Limits(output_mb=1))
    (found,) = made.run(SUM, [STDIN], 1.0).tests
    assert "too large" in found.detail
    assert found.verdict == "fail"  # its program wrote all that


def test_more_output_than_its_limit_is_the_programs_fault(service: Service) -> None:
    made = remote(service, limits=Limits(output_mb=1))
    (found,) = made.run("print('x' * (2 << 20))", [STDIN], 2.0).tests
    assert (found.verdict, found.detail) == ("fail", "output limit")
    assert len(service.requests) == 1


def test_threads_share_it(service: Service) -> None:
    made = remote(service, at_once=2)
    found: list[str] = []

    def work() -> None:
        found.append(made.run(ADD, [CALL], 2.0).verdict)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == ["pass"] * 6


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("localhost:8080", {}, "http or https URL"),
        ("http://", {}, "http or https URL"),
        ("http://x", {"at_once": 0}, "at_once >= 1"),
    ],
)
def test_mistakes(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RemoteSandbox(url, **options)


def test_no_tests_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="needs tests"):
        RemoteSandbox("http://x").run(ADD, [], 1.0)


def test_a_slow_service_is_waited_for_until_nobody_wants_the_result(service: Service) -> None:
    asked: list[float] = []

    def stop() -> bool:
        asked.append(time.monotonic())
        return len(asked) > 2

    made = remote(service)
    with service.lock:
        with pytest.raises(StoppedError):
            made.run(SUM, [STDIN], 1.0, stop=stop)
        threading.Timer(0.5, service.lock.release).start()
        found = made.run(SUM, [STDIN], 1.0, stop=lambda: False)
        service.lock.acquire()
    assert found.verdict == "pass"
    assert asked[-1] - asked[0] < 5


def test_reward_code_can_use_a_service(service: Service, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("sesame\n")
    address = f"http://127.0.0.1:{service.server_port}"
    reward = CodeReward({"remote": address, "remote_token_file": str(token)})
    request = GradeRequest(
        attempt=AttemptId(0),
        prompt="?",
        completion=f"Here it is:\n```python\n{ADD}```",
        completion_ids=[],
        row={"tests": [{"call": "add", "args": [1, 2], "expected": 3}]},
        timeouts_s=(2.0,),
    )
    scored = reward(request)
    assert (scored.score, scored.run.level, scored.run.forgeable) == (1.0, "remote", True)
    assert service.tokens == ["Bearer sesame"]
    service.troubles = [404]
    with pytest.raises(GradingError, match=r"^the remote sandbox at .* refuses requests"):
        reward(request)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b" \r\n", "is empty"),
        (b"sesame\nopen\n", "holds no token: it has white space or is no printable ASCII"),
        (b"sesame open", "holds no token: it has white space or is no printable ASCII"),
        (b"sesame\x07", "holds no token: it has white space or is no printable ASCII"),
        ("sesame\u00e9".encode(), "holds no token: it has white space or is no printable ASCII"),
    ],
)
def test_a_file_without_a_token_is_refused_before_the_run(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match="remote_token_file") as error:
        CodeReward({"remote": "http://127.0.0.1:9", "remote_token_file": str(file)})
    assert str(error.value) == f"rewards: 'code': {file} {problem} (options.remote_token_file)"


def test_a_wrong_url_of_the_service_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"rewards: 'code'.*http or https URL, got 'sandbox:8080'"):
        CodeReward({"remote": "sandbox:8080"})
