"""A forked child is what a fresh process would be, and knows of no other."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollpacker.processes import fork_server
from rollpacker.processes.children import OUTSIDE, Child, kill_child
from rollpacker.processes.fork_server import fork_child
from waiting import alive, until

PRELOAD = ("numpy", "numpy.random")
PROBE = """
import ctypes, json, os, random, signal, socket, sys, threading

from rollpacker.processes.children import die_with

def main(descriptor, parent):
    die_with(parent)
    told = {
        "pid": os.getpid(),
        "parent": parent,
        "group": os.getpgid(0),
        "session": os.getsid(0),
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
        "folder": os.getcwd(),
        "said": os.environ.get("SAID"),
        "threads": threading.active_count(),
        "dumpable": ctypes.CDLL(None).prctl(3),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "child": signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
        "draws": [random.random(), __import__("numpy").random.random()],
        "main": sys.modules["__main__"].__dict__.get("main") is not None,
        "kept": "rollpacker.processes.forked_from" in sys.modules,
    }
    end = socket.socket(fileno=descriptor)
    end.sendall(json.dumps(told).encode() + b"\\n")
    word = end.recv(100)
    if word == b"raise":
        raise RuntimeError("as it was told")
    sys.exit(int(word or 0))
"""


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """``probe()``: a child, our end of its socket, and what it says of itself."""
    (tmp_path / "forked_probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    started: list[tuple[Child, socket.socket]] = []

    def start() -> tuple[Child, socket.socket, dict[str, Any]]:
        started.append(fork_child("forked_probe", PRELOAD))
        child, end = started[-1]
        return child, end, json.loads(end.makefile("rb").readline())

    yield start
    for child, end in started:
        end.close()
        kill_child(child)


def server() -> psutil.Process:
    return psutil.Process(fork_server._servers[f"{os.getpid()}", *PRELOAD]._forkserver_pid)


def test_it_is_as_a_fresh_process_is(probe) -> None:
    (first, _, told), (second, _, also) = probe(), probe()
    assert told["pid"] == first.pid != second.pid
    assert told["group"] == told["session"] == told["pid"]
    assert told["parent"] == server().pid == also["parent"]
    assert told["files"] == also["files"] == [0, 1, 2, 3]
    assert told["folder"] == os.getcwd()
    assert (told["threads"], told["dumpable"], told["child"]) == (1, 1, True)
    assert told["kept"]
    assert psutil.Process(first.pid).name() == "forked_probe"
    assert set(OUTSIDE) <= set(told["blocked"])
    assert not set(told["draws"]) & set(also["draws"])
    assert server().num_threads() == 1


def test_what_has_changed_since_is_seen(probe, tmp_path, monkeypatch) -> None:
    _, _, told = probe()
    monkeypatch.setenv("SAID", "something")
    _, _, after = probe()
    monkeypatch.chdir(tmp_path)
    _, _, there = probe()
    _, _, again = probe()
    assert [each["said"] for each in (told, after, there)] == [None, "something", "something"]
    assert there["folder"] == str(tmp_path)
    assert told["parent"] == after["parent"] == there["parent"] == again["parent"]
    assert alive(told["pid"])


@pytest.mark.parametrize(
    ("word", "how"), [("7", "exited with code 7"), ("raise", "exited with code 1")]
)
def test_how_it_ended_is_told(probe, capfd, word: str, how: str) -> None:
    child, end, told = probe()
    assert child.poll() is None
    end.send(word.encode())
    until(lambda: child.poll() is not None)
    assert kill_child(child) == how
    until(lambda: not psutil.pid_exists(told["pid"]))
    assert ("RuntimeError: as it was told" in capfd.readouterr().err) == (word == "raise")


def test_one_that_is_killed_says_so(probe) -> None:
    (one, _, _), (other, _, _) = probe(), probe()
    os.kill(one.pid, signal.SIGTERM)  # blocked until user code runs
    os.kill(one.pid, signal.SIGSEGV)
    until(lambda: one.poll() is not None)
    assert (kill_child(one), kill_child(other)) == (
        "was killed by signal 11",
        "was killed by signal 9",
    )


def test_children_end_with_their_server_and_the_next_one_has_another(probe) -> None:
    child, _, told = probe()
    os.kill(told["parent"], signal.SIGKILL)
    until(lambda: child.poll() is not None)
    assert kill_child(child) == "was killed by signal 9"
    until(lambda: not alive(told["pid"]))
    _, _, after = probe()
    assert after["parent"] != told["parent"]
