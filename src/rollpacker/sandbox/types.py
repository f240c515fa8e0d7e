"""Tests, verdicts and limits of the code sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

Level = Literal["strong", "standard", "basic"]
LEVELS: tuple[Level, ...] = ("strong", "standard", "basic")  # strongest first

Outcome = Literal["pass", "fail", "tle_cpu", "tle_idle", "crash", "infra"]
"""``tle_cpu``: over the CPU budget. ``tle_idle``: slept or stopped past the wall cap. ``infra``:
the sandbox failed, not the program, even after retries."""

FLOAT_TOLERANCE = 1e-6
"""Absolute or relative, whichever is more. For numbers that are no integers."""


class SandboxUnavailableError(RuntimeError):
    """This machine lacks the requested level, or a sandbox cannot be kept up."""


class StoppedError(RuntimeError):
    """The caller stopped a program that was running."""

    def __init__(self) -> None:
        super().__init__("the program was stopped: nobody waits for its result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """The program runs as a script and must print ``stdout``."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A function of the program must return ``expected``.

    Args:
        call: ``name`` or ``Class.method``. A ``name`` that the program lacks is looked up in its
            class ``Solution``.
        args: JSON values, by place or by name. A dict among those by place may have integers as
            keys.
        expected: never enters the sandbox.
        in_place: the function returns nothing. Its first argument afterwards counts.
        or_list: a list with only the expected value is right as well.
        nodes: LeetCode's ``ListNode`` or ``TreeNode`` for arguments, by place or name, and for the
            ``return``, if these are lists here. A leading ``*`` stands for a list of them.
    """

    call: str
    args: Sequence[Any] | Mapping[str, Any]
    expected: Any
    in_place: bool = False
    or_list: bool = False
    nodes: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTest:
    """Statements with asserts, or pytest-style ``test_*`` functions, run beside the program.

    Literals that they expect stay outside (``grading.decode``). A hostile program can forge the
    success of other asserts, which are checked in its process.

    Args:
        prompt: source before the program. Its imports and functions are available, and a program
            that is only the body of its last function completes it.
        stub: the function that the prompt only begins.
    """

    asserts: str
    prompt: str = ""
    stub: str = ""


Test = StdinTest | CallTest | AssertTest

_KINDS = {
    kind: (frozenset(f.name for f in fields(kind) if f.default is MISSING), {*kind.__slots__})
    for kind in get_args(Test)
}  # the keys that each kind must have and may have


def parse_test(data: Mapping[str, Any]) -> Test:
    """Return a test from its JSON object. Raises ``ValueError`` if its kind is unknown."""
    for kind, (needed, known) in _KINDS.items():
        if needed <= data.keys() <= known:
            return kind(**data)
    expected = " or ".join("{" + ", ".join(sorted(names)) + "}" for names, _ in _KINDS.values())
    raise ValueError(f"a test has the keys {sorted(data)}, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """The outcome of one test.

    Args:
        cpu_s: CPU seconds that the program took.
        wall_s: seconds that the program existed.
        detail: why it did not pass, in few words. Partly the program's own.
        found: the beginning of wrong output or of a wrong value.
    """

    __test__ = False

    verdict: Outcome
    cpu_s: float
    wall_s: float
    detail: str = ""
    found: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a program.

    Args:
        verdict: ``pass`` if all tests passed, ``infra`` if one is, else the first other one.
        tests: one result per test, in order, fewer if the run stopped early.
        level: the isolation of the program. ``remote``: that of the service.
        cpu_s: CPU seconds of all tests.
        forgeable: a test was run where the program could change its outcome.
    """

    verdict: Outcome
    tests: tuple[TestResult, ...]
    level: Level | Literal["remote"]
    cpu_s: float
    forgeable: bool

    @property
    def passed(self) -> int:
        return sum(result.verdict == "pass" for result in self.tests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources of a program: MiB of address space, MiB of each output and of the result. The
    wall cap is ``max(10 T, T + idle_s)`` for a budget of T CPU seconds."""

    memory_mb: int = 1024
    output_mb: int = 8
    idle_s: float = 10.0

    def __post_init__(self) -> None:
        if self.memory_mb < 128 or self.output_mb < 1 or self.idle_s <= 0:
            raise ValueError(
                "a sandbox needs memory_mb >= 128, output_mb >= 1 and idle_s > 0, got "
                f"memory_mb={self.memory_mb}, output_mb={self.output_mb}, idle_s={self.idle_s}"
            )

    def wall_cap(self, budget_s: float) -> float:
        """Return the seconds, less the wait for a core, that a budget of CPU seconds may stretch
        to."""
        return max(10.0 * budget_s, budget_s + self.idle_s)
