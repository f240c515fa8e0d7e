"""Runs the hostile programs of ``hostile.toml`` in a sandbox and reports those that escape."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rollpacker.sandbox.base import ProgramRunner
from rollpacker.sandbox.types import AssertTest, CallTest, Level, StdinTest, Test, Verdict

ESCAPED = "ESCAPED"
_WRONG = ("fail", "crash", "tle_cpu", "tle_idle")
_HONEST = StdinTest(stdin="20 22\n", stdout="42\n")
_HONEST_PROGRAM = "print(sum(map(int, input().split())))"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The result of a self-test."""

    level: Level
    contained: int
    total: int
    escaped: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hostile:
    """A hostile program. It passes ``test`` only if it escapes, and one of ``verdicts`` shows that
    it was contained. ``before`` runs before it in the same sandbox."""

    name: str
    kind: str
    program: str
    test: Test
    verdicts: tuple[str, ...]
    before: str | None

    def contained(self, verdict: Verdict) -> bool:
        return verdict.verdict in self.verdicts


class Targets:
    """Files, sockets and a process that hostile programs aim at."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        # Every uid may write here, so that only the sandbox prevents it.
        self._folder.chmod(0o777)
        self._victim = self._make("victim", "untouched")
        secret = self._make("secret", "secret")
        self._sockets = [self._listen(socket.AF_INET, ("127.0.0.1", 0))]
        unix = str(self._folder / "socket")
        abstract = f"rollpacker-{secrets.token_hex(8)}"
        self._sockets += [self._listen(socket.AF_UNIX, each) for each in (unix, f"\0{abstract}")]
        Path(unix).chmod(0o777)
        self._canary = subprocess.Popen(
            [sys.executable, "-S", "-c", "import time; time.sleep(600)"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._before = self._listing()
        self.fields: dict[str, Any] = {
            "pid": os.getpid(),
            "canary": self._canary.pid,
            "folder": str(self._folder),
            "victim": str(self._victim),
            "secret": str(secret),
            "package": str(np.__file__),
            "port": self._sockets[0].getsockname()[1],
            "unix": unix,
            "abstract": abstract,
        }

    def _make(self, name: str, text: str) -> Path:
        file = self._folder / name
        file.write_text(text, encoding="ascii")
        file.chmod(0o666)
        return file

    def _listen(self, family: socket.AddressFamily, address: Any) -> socket.socket:
        sock = self._stack.enter_context(socket.socket(family))
        sock.bind(address)
        sock.listen()
        sock.setblocking(False)
        return sock

    def _listing(self) -> list[tuple[str, int, float]]:
        files = ((path.name, path.lstat()) for path in self._folder.iterdir())
        return sorted((name, found.st_mode, found.st_mtime) for name, found in files)

    def damage(self) -> list[str]:
        """Return the changes that hostile programs made, seen from outside."""
        found: list[str] = []
        if self._canary.poll() is not None:
            found.append("a process was killed")
        untouched = self._listing() == self._before and self._victim.read_text() == "untouched"
        if not untouched:
            found.append("files were changed")
        for sock in self._sockets:
            with contextlib.suppress(BlockingIOError):
                sock.accept()[0].close()
                found.append("a socket was connected to")
        return found

    def __enter__(self) -> Targets:
        return self

    def __exit__(self, *_: object) -> None:
        self._canary.kill()
        self._canary.wait()
        self._stack.close()


def hostile_programs(world: Targets) -> list[Hostile]:
    """Return all hostile programs, aimed at a world."""
    tests = _tests(world)
    found: list[Hostile] = []
    for group in _read()["groups"]:
        for name, each in group["programs"].items():
            own: Mapping[str, Any] = {"program": each} if isinstance(each, str) else each
            program = own["program"]
            if "repeat" in own:
                program = program.replace("@", own["repeat"] * own["times"])
            found.append(
                Hostile(
                    name=name,
                    kind=group["kind"],
                    program=group.get("prelude", "") + program,
                    test=tests[own.get("test", group["test"])],
                    verdicts=tuple(group.get("verdicts", _WRONG)),
                    before=own.get("before"),
                )
            )
    return found


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("hostile.toml").read_text(encoding="utf-8"))


def _tests(world: Targets) -> dict[str, Test]:
    answer = f"expected-{secrets.token_hex(16)}"
    lines = "".join(f"{n}.5\n" for n in range(50_000))
    return {
        "escaped": StdinTest(stdin=json.dumps(world.fields) + "\n", stdout=ESCAPED),
        "nothing": StdinTest(stdin="", stdout=ESCAPED),
        "answer": CallTest(call="f", args=[world.fields], expected=answer),
        "asserts_answer": AssertTest(asserts=f"assert f(None) == {answer!r}"),
        "prints_answer": StdinTest(stdin="1\n", stdout=answer),
        "unknown": CallTest(call="f", args=[3], expected=secrets.token_hex(16)),
        "small": CallTest(call="f", args=[1], expected={"a": 1}),
        "keys": CallTest(call="f", args=[1], expected={str(n): 0 for n in range(580)}),
        "numbers": CallTest(call="f", args=[1], expected={str(n): 0 for n in range(40_000)}),
        "asserts": AssertTest(asserts="assert f(1) == 2"),
        "lines": StdinTest(stdin="", stdout=lines),
        "line": StdinTest(stdin="", stdout="1.5 " * 100_000),
    }


def quick_check(sandbox: ProgramRunner[Level]) -> list[str]:
    """Run some fast hostile programs. Return the names of those that escaped."""
    with Targets() as world:
        programs = [each for each in hostile_programs(world) if each.name in _read()["quick"]]
        return _escaped(sandbox, programs, 2.0) + world.damage()


def selftest(sandbox: ProgramRunner[Level], timeout_s: float = 0.3) -> SelfTest:
    """Run every hostile program and, after each, a harmless one. ``sandbox``: its limits should be
    small, because ``idle_s`` is often waited for. ``timeout_s``: CPU seconds of each program."""
    with Targets() as world:
        programs = hostile_programs(world)
        descriptors = _descriptors()
        escaped = _escaped(sandbox, programs, timeout_s)
        damage = world.damage()
        if _descriptors() > descriptors:
            damage.append("descriptors were leaked")
    contained = 0 if damage else len(programs) - len(escaped)
    return SelfTest(
        level=sandbox.level,
        contained=contained,
        total=len(programs),
        escaped=(*escaped, *damage),
    )


def _escaped(sandbox: ProgramRunner[Level], programs: list[Hostile], timeout_s: float) -> list[str]:
    escaped: list[str] = []
    for hostile in programs:
        if hostile.before is not None:
            sandbox.run(hostile.before, [StdinTest(stdin="", stdout="")], timeout_s)
        verdict = sandbox.run(hostile.program, [hostile.test], timeout_s)
        if not hostile.contained(verdict):
            detail = verdict.tests[0].detail
            escaped.append(f"{hostile.name} ({verdict.verdict}{': ' if detail else ''}{detail})")
        elif sandbox.run(_HONEST_PROGRAM, [_HONEST], 5.0).verdict != "pass":
            escaped.append(f"{hostile.name} (harmed the next program)")
    return escaped


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
