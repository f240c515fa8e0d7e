"""Hostile programs are contained, and would get through if they were not."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollpacker.sandbox import LEVELS, AssertTest, Level, Sandbox, SandboxUnavailableError, Verdict
from rollpacker.sandbox.selftest import (
    ESCAPED,
    Hostile,
    Targets,
    hostile_programs,
    quick_check,
    selftest,
)
from rollpacker.sandbox.types import Limits, Outcome
from waiting import until

# They would harm the machine, need a program before them, or a kernel built for x32.
NOT_OUTSIDE = {"mount", "write_compiled_module", "write_shared_memory", "kill_everyone"}
NOT_OUTSIDE |= {"earlier_program", "foreign_numbers"}
# What a container or another uid may stop as well.
NOT_EVERYWHERE = {
    "foreign_machine", "change_root", "become_root", "new_namespace", "io_uring", "keyring",
    "kernel_program", "kernel_log", "fault_handler", "performance_events", "change_owner",
    "open_by_handle", "trace_canary", "trace_parent", "read_parent_memory", "raise_limits",
    "read_canary_memory", "read_parent_environment", "unnamed_file", "change_attributes",
    "read_packages", "list_root", "limit_canary", "signal_parent", "execute_self",
}  # fmt: skip


LIMITS = Limits(memory_mb=256, output_mb=2, idle_s=0.2)


def contains_all(level: Level) -> None:
    with Sandbox(level, limits=LIMITS, check=False) as sandbox:
        found = selftest(sandbox, timeout_s=0.05)
    assert found.escaped == ()
    assert found.contained == found.total >= 230


def test_every_program_is_contained(level: Level) -> None:
    contains_all(level)


@pytest.fixture(params=LEVELS[1:])
def weaker(request: pytest.FixtureRequest, level: Level) -> Level:
    """A level below the strongest of this machine."""
    if LEVELS.index(request.param) <= LEVELS.index(level):
        pytest.skip("is not below it")
    return request.param


def test_some_programs_are_contained_by_every_level(weaker: Level) -> None:
    with Sandbox(weaker, limits=LIMITS, check=False) as sandbox:
        assert quick_check(sandbox) == []


@pytest.mark.slow
def test_every_program_is_contained_by_every_level(weaker: Level) -> None:
    contains_all(weaker)


def outside(hostile: Hostile, world: Targets) -> str:
    """What it prints without a sandbox."""
    with tempfile.TemporaryFile("w+") as stdin:
        stdin.write(getattr(hostile.test, "stdin", ""))
        stdin.seek(0)
        done = subprocess.run(
            [sys.executable, "-S", "-c", hostile.program],
            stdin=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            cwd=world.fields["folder"],
        )
    return done.stdout


@pytest.mark.wide
def test_escapes_would_succeed_outside() -> None:
    """Or else their containment would say nothing."""
    with Targets() as world:
        names = {each.name for each in hostile_programs(world) if each.kind == "escape"}
    left = sorted(names - NOT_OUTSIDE - NOT_EVERYWHERE, reverse=True)
    failed: list[str] = []
    while left:
        with Targets() as world:
            aimed = {each.name: each for each in hostile_programs(world)}
            while left and not world.damage():  # one that was hit is no target any more
                name = left.pop()
                if ESCAPED not in outside(aimed[name], world):
                    failed.append(name)
    # subprocess and pytest may have left no other descriptor open.
    assert set(failed) <= {"other_descriptors"}


def test_damage_is_seen() -> None:
    with Targets() as world:
        assert world.damage() == []
        Path(world.fields["victim"]).write_text("x")
        assert world.damage() == ["files were changed"]
    names = {"kill_canary": "a process was killed", "connect_unix": "a socket was connected to"}
    for name, damage in names.items():
        with Targets() as world:
            (hostile,) = [each for each in hostile_programs(world) if each.name == name]
            outside(hostile, world)
            assert until(world.damage) == [damage]


def test_a_forger_gets_through_where_asserts_are_forgeable_only(sandbox: Sandbox) -> None:
    forger = 'import os\nos.write(3, b\'{"held":true,"value":["l",[]]}\')\nos._exit(0)'
    equal = "class E:\n __eq__ = lambda self, other: True\ndef f(x): return E()"
    outside, inside = "assert f(1) == 2", "for n in [1]: assert f(n) == n + 1"
    for program, asserts, verdict in (
        (forger, outside, "fail"),
        (forger, inside, "pass"),
        (equal, outside, "crash"),
        (equal, inside, "fail"),
    ):
        found = sandbox.run(program, [AssertTest(asserts=asserts)], 2.0)
        assert (found.verdict, found.forgeable) == (verdict, asserts is inside)


def test_the_quick_check_passes_and_can_fail(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert quick_check(sandbox) == []
    monkeypatch.setattr(Hostile, "contained", lambda self, verdict: self.name != "write_file")
    assert [each.partition(" ")[0] for each in quick_check(sandbox)] == ["write_file"]
    with pytest.raises(SandboxUnavailableError, match="hostile programs got through: write_file"):
        Sandbox(sandbox.level)


def test_infra_is_not_containment() -> None:
    with Targets() as world:
        hostile = hostile_programs(world)[0]
    outcomes: dict[Outcome, bool] = {"infra": False, "pass": False, "crash": True}
    for outcome, contained in outcomes.items():
        verdict = Verdict(verdict=outcome, tests=(), level="standard", cpu_s=0.0, forgeable=False)
        assert hostile.contained(verdict) is contained
