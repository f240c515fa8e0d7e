"""Full disks, damaged files, a daemon that stands still, a second daemon, a job too many."""

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mux_fleet import Daemon, Link

from rollpacker.cli import main

COMMAND = "from rollpacker.cli import main; main()"
Call = Callable[..., tuple[int, str, str]]
SPEC = {"worst_rollout_s": 10.0, "worst_train_s": 10.0, "slo": 100.0}


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run ``rollpacker mux`` as its entry point does: exit code, standard output and error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rollpacker", "mux", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return int(left.value.code or 0), *capsys.readouterr()

    return run


def submit_until_refused(link: Link) -> list[str]:
    """Acknowledged jobs, until the daemon says that it cannot write."""
    acknowledged: list[str] = []
    for number in range(20_000):
        name = f"job{number}"
        status, told = link.once("POST", "/v1/jobs", SPEC | {"id": name}, name)
        if status == 503:
            assert "send the same request with the same key again" in told["error"]
            return acknowledged
        assert status == 201
        acknowledged.append(name)
    raise AssertionError("the disk is never full")


def jobs_of(link: Link) -> list[str]:
    return [job["id"] for job in link.until_answered("GET", "/v1/jobs")[1]["jobs"]]


@pytest.mark.wide
def test_a_file_that_cannot_grow(tmp_path: Path) -> None:
    """Writes fail at a limit; what was acknowledged stays, and the same keys work after it."""
    daemon = Daemon(tmp_path, ttl=60.0)
    daemon.file_limit = 400_000
    daemon.start()
    link = Link(daemon.port, daemon.token)
    acknowledged = submit_until_refused(link)
    assert len(acknowledged) > 5
    # The numbers are told while nothing can be written, but for the state.
    status, numbers = link.once("GET", "/metrics")
    assert status == 200
    assert re.search(r"^rollmux_store_failures_total [1-9]", numbers, re.M)
    assert ("rollmux_store_writable 1.0" in numbers) == ("rollmux_jobs{" in numbers)
    time.sleep(1.1)
    assert jobs_of(link) == acknowledged
    daemon.stop()
    daemon.file_limit = None
    daemon.start()
    assert jobs_of(link) == acknowledged
    retried = f"job{len(acknowledged)}"
    for name in (acknowledged[0], retried):
        assert link.once("POST", "/v1/jobs", SPEC | {"id": name}, name)[0] == 201
    assert jobs_of(link) == [*acknowledged, retried]
    daemon.stop()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_disk(small_disk: Path, call: Call) -> None:
    """ENOSPC for real: refused while it lasts, served again without a restart."""
    daemon = Daemon(small_disk, ttl=60.0)
    daemon.start()
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * 250_000)
    link = Link(daemon.port, daemon.token)
    acknowledged = submit_until_refused(link)
    assert link.once("GET", "/v1/health")[0] == 503
    to = ["--url", f"http://127.0.0.1:{daemon.port}", "--state", str(small_disk)]
    code, _, err = call("end", acknowledged[0], *to)
    assert (code, err.startswith("rollpacker: the daemon cannot do it now: ")) == (1, True), err
    ballast.unlink()
    retried = f"job{len(acknowledged)}"
    answer = link.until_answered("POST", "/v1/jobs", SPEC | {"id": retried}, retried)
    assert answer[0] == 201
    assert link.once("GET", "/v1/health")[0] == 200
    assert jobs_of(link) == [*acknowledged, retried]
    daemon.kill()
    daemon.start()
    assert jobs_of(link) == [*acknowledged, retried]
    daemon.stop()


def test_a_daemon_that_stood_still_longer_than_a_lease(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ttl=1.0)
    daemon.start()
    link = Link(daemon.port, daemon.token)
    for name in ("a", "b"):
        link.once("POST", "/v1/jobs", SPEC | {"id": name}, name)
    asked = {"phase": "rollout", "wait_s": 0}
    _, mine = link.once("POST", "/v1/jobs/a/permits", asked | {"wait_s": 5}, "a1")
    assert link.once("POST", "/v1/jobs/b/permits", asked, "b1")[0] == 204
    daemon.signal(signal.SIGSTOP)
    time.sleep(1.2)
    daemon.signal(signal.SIGCONT)
    path = f"/v1/permits/{mine['token']}"
    assert link.once("POST", f"{path}/heartbeat", {}, "h1")[0] == 409
    assert link.once("POST", f"{path}/finish", {"seconds": 1.0}, "f1")[0] == 409
    status, theirs = link.once("POST", "/v1/jobs/b/permits", asked | {"wait_s": 5}, "b1")
    assert (status, theirs["nodes"]) == (200, mine["nodes"])
    assert theirs["token"] > mine["token"]
    daemon.stop()


def test_a_second_daemon_does_not_start(tmp_path: Path, call: Call) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    code, _, err = call("serve", "--state", str(tmp_path), "--port", "0")
    assert (code, "another daemon is running on this database" in err) == (1, True)
    code, _, err = call("serve", "--state", str(tmp_path / "b"), "--port", str(daemon.port))
    assert (code, "cannot listen on" in err) == (1, True)
    daemon.stop()


@pytest.mark.wide
def test_from_the_command_line(tmp_path: Path, call: Call) -> None:
    daemon = Daemon(tmp_path / "state")
    daemon.start()
    to = ["--url", f"http://127.0.0.1:{daemon.port}", "--state", str(tmp_path / "state")]
    spec = tmp_path / "job.json"
    spec.write_text('{"id": "a", "worst_rollout_s": 10, "worst_train_s": 5}')
    wait = f"wait for its end: rollpacker mux wait a --state {tmp_path / 'state'} --url {to[1]}"
    code, out, _ = call("submit", str(spec), *to)
    assert (code, *out.splitlines()[:2]) == (0, "job a submitted", wait)
    assert out.splitlines()[2].startswith("it has no program: start its driver")
    code, _, err = call("submit", str(spec), *to)
    assert (code, "job a exists already" in err) == (2, True)
    assert call("status", *to)[1].count("r0 t0") == 1
    assert call("drain", *to, "--json")[1] == '{"draining": true, "jobs": 1}\n'
    daemon.stop()
    code, _, err = call("status", *to)
    assert (code, "no daemon answers" in err) == (1, True)
