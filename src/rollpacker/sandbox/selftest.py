"""Runs hostile programs in a sandbox and says which got through."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rollpacker.sandbox.base import ProgramRunner
from rollpacker.sandbox.hostile import Hostile, Targets, hostile_programs
from rollpacker.sandbox.types import Level, StdinTest

_QUICK = (
    "read_secret",
    "read_secret_by_openat2",
    "read_parent_environment",
    "other_descriptors",
    "write_file",
    "truncate",
    "fork_by_number",
    "native_thread",
    "execute",
    "signal_trainer",
    "trace_canary",
    "connect_abstract",
    "connect_inet",
    "io_uring",
    "searches_heap",
)
_HONEST = StdinTest(stdin="20 22\n", stdout="42\n")
_HONEST_PROGRAM = "print(sum(map(int, input().split())))"


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """What a self-test found.

    Args:
        level: of the sandbox.
        contained: hostile programs that were.
        total: hostile programs.
        escaped: what got through or was harmed, in words.
    """

    level: Level
    contained: int
    total: int
    escaped: tuple[str, ...]


def quick_check(sandbox: ProgramRunner[Level]) -> list[str]:
    """Names of those of some fast hostile programs that got through."""
    with Targets() as world:
        programs = [each for each in hostile_programs(world) if each.name in _QUICK]
        return _escaped(sandbox, programs, 2.0) + world.damage()


def selftest(sandbox: ProgramRunner[Level], timeout_s: float = 0.3) -> SelfTest:
    """Run every hostile program and, after each, an honest one.

    Args:
        sandbox: its limits should be small: ``idle_s`` is waited for often.
        timeout_s: CPU seconds of each program.
    """
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
