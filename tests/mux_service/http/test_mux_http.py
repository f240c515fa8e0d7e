"""The daemon over HTTP: tokens, limits, slow and rude clients, one form of errors."""

import http.client
import json
import os
import random
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mux_fleet import Daemon, Link
from typer.testing import CliRunner

from rollpacker.cli import app
from rollpacker.processes.children import allow_files
from rollpacker.rollmux.service.http.tokens import (
    is_authorized,
    make_token,
    read_token,
)
from rollpacker.rollmux.service.serve import ServeOptions, serve

SPEC = {"id": "a", "worst_rollout_s": 10.0, "worst_train_s": 10.0, "slo": 100.0}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    made = Daemon(tmp_path_factory.mktemp("state"), ttl=60.0)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def link(daemon: Daemon) -> Iterator[Link]:
    made = Link(daemon.port, daemon.token)
    yield made
    made.close()


def raw(daemon: Daemon, data: bytes, timeout_s: float = 20.0) -> bytes:
    """What comes back for bytes, until the connection is closed or reset."""
    parts = []
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=timeout_s) as sock:
        try:
            sock.sendall(data)
            while part := sock.recv(65536):
                parts.append(part)
        except ConnectionError:
            pass
    return b"".join(parts)


def head(daemon: Daemon, line: str, *more: str) -> bytes:
    lines = [line, "Host: x", f"Authorization: Bearer {daemon.token}", "Connection: close", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def test_without_the_token_nothing_is_told(daemon: Daemon) -> None:
    rng = random.Random(3)
    good = daemon.token
    wrong = [good[:-1], good + "x", good.swapcase(), "", "Bearer", good[::-1], "\x7f" * 40]
    wrong += ["".join(chr(rng.randrange(33, 256)) for _ in range(43)) for _ in range(50)]
    for text in wrong:
        for form in (f"Bearer {text}", text, f"Basic {text}", f"Bearer {text} {good}"):
            connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=20)
            connection.request(
                "GET", "/v1/status", headers={"Authorization": form.encode("latin-1")}
            )
            answer = connection.getresponse()
            assert answer.status == 401, form
            assert set(json.loads(answer.read())) == {"error"}
            connection.close()
    two = head(daemon, "GET /v1/status HTTP/1.1", "Authorization: Bearer other-token-other")
    assert raw(daemon, two).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b'{"id": NaN}', 400),
        (b"\xff\xfe", 400),
        (b"[" * 60_000, 400),
        (b'{"id": "\\ud800"}', 400),
        (b'{"x": 1e999}', 400),
        (b"x" * 70_000, 413),
    ],
)
def test_bodies_that_are_no_request(daemon: Daemon, body: bytes, status: int) -> None:
    more = ("Idempotency-Key: k1", f"Content-Length: {len(body)}")
    answer = raw(daemon, head(daemon, "POST /v1/jobs HTTP/1.1", *more) + body)
    assert answer.startswith(f"HTTP/1.1 {status}".encode()), answer[:300]
    assert b'"error":' in answer


def test_a_body_without_end_is_cut_off(daemon: Daemon) -> None:
    start = head(daemon, "POST /v1/jobs HTTP/1.1", "Transfer-Encoding: chunked")
    answer = raw(daemon, start + b"1000\r\n" + (b"x" * 4096 + b"\r\n1000\r\n") * 40)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 413")


def test_headers_have_a_limit(daemon: Daemon) -> None:
    for more in ("X: " + "y" * 40_000, "\r\n".join(f"X{n}: y" for n in range(6000))):
        answer = raw(daemon, head(daemon, "GET /v1/status HTTP/1.1", more))
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


@pytest.mark.parametrize("key", [None, "", "with space", "x" * 129, "ü"])
def test_every_post_needs_a_key(link: Link, key: str | None) -> None:
    for path in ("/v1/jobs", "/v1/drain", "/v1/permits/0/heartbeat", "/v1/jobs/a/permits"):
        if key == "ü":
            continue
        status, told = link.once("POST", path, SPEC if path == "/v1/jobs" else {}, key)
        assert status == 400
        assert told["error"].startswith("Idempotency-Key:")


def test_errors_have_one_form(link: Link) -> None:
    cases = [
        ("GET", "/v1/nothing", None, 404),
        ("PUT", "/v1/jobs", {}, 405),
        ("GET", "/v1/jobs/none", None, 404),
        ("POST", "/v1/jobs/none/permits", {"phase": "rollout"}, 404),
        ("POST", "/v1/permits/x/finish", {"seconds": 1}, 404),
        ("POST", "/v1/permits/99999/finish", {"seconds": 1}, 404),
        ("POST", f"/v1/permits/{'9' * 5000}/finish", {"seconds": 1}, 404),
        ("POST", "/v1/nodes/r99/failed", {}, 404),
        ("POST", "/v1/drain", {"draining": 1}, 400),
        ("POST", "/v1/drain", {"drain": True}, 400),
        ("GET", "/v1/timeline?window_s=x", None, 400),
    ]
    for number, (method, path, body, status) in enumerate(cases):
        found, told = link.once(method, path, body, f"form-{number}")
        assert (found, next(iter(told))) == (status, "error"), path
        assert "\n" not in told["error"]


def test_permit_requests_wait_and_then_give_up(link: Link) -> None:
    link.once("POST", "/v1/jobs", SPEC, "wait-a")
    link.once("POST", "/v1/jobs", SPEC | {"id": "b"}, "wait-b")
    asked = {"phase": "rollout", "wait_s": 5}
    _, mine = link.once("POST", "/v1/jobs/a/permits", asked, "wait-1")
    began = time.monotonic()
    status, _ = link.once("POST", "/v1/jobs/b/permits", asked | {"wait_s": 0.3}, "wait-2")
    assert status == 204
    assert time.monotonic() - began >= 0.3
    got: list[Any] = []

    def wait() -> None:
        other = Link(link._port, link._headers["Authorization"].split()[1])
        got.append(other.once("POST", "/v1/jobs/b/permits", asked | {"wait_s": 15}, "wait-2"))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    done = link.once("POST", f"/v1/permits/{mine['token']}/finish", {"seconds": 1.0}, "wait-3")
    assert done[0] == 200
    waiter.join(20)
    assert got[0][0] == 200
    assert got[0][1]["nodes"] == mine["nodes"]
    for bad in (-1, 61, "1", True):
        status, told = link.once("POST", "/v1/jobs/b/permits", asked | {"wait_s": bad}, "wait-4")
        assert (status, told["error"][:6]) == (400, "wait_s")


def test_slow_clients_are_dropped_and_hurt_nobody(tmp_path: Path) -> None:
    made = Daemon(tmp_path, ttl=60.0)
    made.patience = (0.5, 40)
    made.start()
    slow = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(35)]
    try:
        for sock in slow:
            sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert Link(made.port, made.token).once("GET", "/v1/status")[0] == 200
        crowd = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(8)]
        slow[0].settimeout(10)
        assert slow[0].recv(1000).startswith(b"HTTP/1.1 503")
        assert Link(made.port, made.token).once("GET", "/v1/status")[0] == 200
        for sock in slow[8:]:
            sock.settimeout(10)
            assert sock.recv(1000) == b""
        for sock in crowd:
            sock.close()
        late = head(made, "POST /v1/jobs HTTP/1.1", "Idempotency-Key: k", "Content-Length: 100")
        assert raw(made, late + b"{").startswith(b"HTTP/1.1 408")
        assert Link(made.port, made.token).once("GET", "/v1/status")[0] == 200
    finally:
        for sock in slow:
            sock.close()
        made.stop()


def test_garbage_is_not_a_request(daemon: Daemon) -> None:
    rng = random.Random(5)
    for _ in range(30):
        noise = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 300)))
        answer = raw(daemon, noise + b"\r\n\r\n")
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert Link(daemon.port, daemon.token).once("GET", "/v1/health")[0] == 200


def test_the_token_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    make_token(path)
    assert path.stat().st_mode & 0o777 == 0o600
    token = read_token(path)
    assert len(token) >= 40
    make_token(path)
    assert read_token(path) == token
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ValueError, match="chmod 600"):
            read_token(path)
    path.chmod(0o600)
    path.write_text("short\n")
    with pytest.raises(ValueError, match="16 or more"):
        read_token(path)
    if os.geteuid() == 0:
        path.write_text("x" * 32)
        os.chown(path, 65534, -1)
        with pytest.raises(ValueError, match="another user"):
            read_token(path)


def test_only_the_bearer_scheme_and_the_whole_token() -> None:
    token = b"t" * 32
    assert is_authorized(b"Bearer " + token, token)
    assert is_authorized(b"bearer " + token, token)
    for header in (token, b"Bearer", b"Basic " + token, b"Bearer " + token[:-1], b"Bearer \xff"):
        assert not is_authorized(header, token)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_another_address_needs_tls(tmp_path: Path, host: str) -> None:
    paths = {"tls_cert": tmp_path, "tls_key": tmp_path}
    for missing in paths:
        given: dict[str, Any] = {name: path for name, path in paths.items() if name != missing}
        with pytest.raises(ValueError, match="--tls-cert and --tls-key"):
            ServeOptions(state=tmp_path, host=host, **given)
    with pytest.raises(ValueError, match="other machines can reach it"):
        ServeOptions(state=tmp_path, host=host)
    ServeOptions(state=tmp_path, host=host, **paths)  # type: ignore[arg-type]
    for local in ("127.0.0.1", "localhost", "::1"):
        ServeOptions(state=tmp_path, host=local)


def test_missing_files_are_named_before_the_daemon_listens(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    for given in ({"tls_cert": absent, "tls_key": absent}, {"token_file": absent}):
        with pytest.raises(ValueError, match=rf"{absent}.*[Nn]o such file"):
            serve(ServeOptions(state=tmp_path, port=0, **given), lambda *_: pytest.fail("ready"))  # type: ignore[arg-type]


def test_tls(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        pytest.skip("needs openssl")
    daemon = Daemon(tmp_path / "state", ttl=60.0, tls=(cert, key))
    daemon.start()
    context = ssl.create_default_context(cafile=str(cert))
    secure = http.client.HTTPSConnection("127.0.0.1", daemon.port, context=context, timeout=20)
    secure.request("GET", "/v1/status", headers={"Authorization": f"Bearer {daemon.token}"})
    assert secure.getresponse().status == 200
    secure.close()
    with pytest.raises(OSError, match=r".*"):
        Link(daemon.port, daemon.token).once("GET", "/v1/status")
    status = ["mux", "status", "--url", f"http://127.0.0.1:{daemon.port}"]
    told = CliRunner().invoke(app, [*status, "--state", str(tmp_path / "state")])
    assert "check http:// or https:// in --url (mux.url)" in str(told.exception)
    daemon.stop()


def test_tls_where_there_is_none_is_said(daemon: Daemon) -> None:
    status = ["mux", "status", "--url", f"https://127.0.0.1:{daemon.port}"]
    told = CliRunner().invoke(app, [*status, "--state", str(daemon.options.state)])
    assert "check http:// or https:// in --url (mux.url)" in str(told.exception)


def test_strangers_keep_nobody_out(tmp_path: Path) -> None:
    """Two thousand connections that say nothing, and two hundred that were idle with a token."""
    made = Daemon(tmp_path, ttl=60.0)
    made.start()
    allow_files(2500)
    held = [Link(made.port, made.token) for _ in range(200)]
    idle: list[socket.socket] = []
    try:
        for link in held:
            assert link.once("GET", "/v1/health")[0] == 200
        for number in range(2000):
            idle.append(socket.create_connection(("127.0.0.1", made.port), timeout=20))
            if number % 200 == 0:
                beat = Link(made.port, made.token)
                assert beat.once("GET", "/v1/nodes/r0")[0] == 200
                assert held[number // 200].once("GET", "/v1/status")[0] == 200
        assert idle[0].recv(1000).startswith(b"HTTP/1.1 503")
        assert raw(made, head(made, "GET /v1/status HTTP/1.1")).startswith(b"HTTP/1.1 200")
        assert held[-1].once("GET", "/v1/status")[0] == 200
    finally:
        for each in (*idle, *held):
            each.close()
        made.stop()


def test_a_state_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """Also one that was there before, with files that others could read."""
    for name, foreign in (("ours", ()), ("shared", ("notes.txt",))):
        state = tmp_path / name
        (state / "logs").mkdir(parents=True, mode=0o755)
        for file in ("token", "audit.jsonl", "logs/a.1.log", *foreign):
            (state / file).write_text("t" * 32)
            (state / file).chmod(0o600 if file == "token" else 0o644)
        state.chmod(0o755)
        made = Daemon(state, ttl=60.0)
        made.start()
        assert Link(made.port, made.token).once("GET", "/v1/health")[0] == 200
        made.stop()
        modes = {path.name: path.stat().st_mode & 0o077 for path in state.rglob("*")}
        assert {name for name, mode in modes.items() if mode} == {*foreign}
        assert "mux.sqlite" in modes
        assert state.stat().st_mode & 0o777 == (0o755 if foreign else 0o700)
