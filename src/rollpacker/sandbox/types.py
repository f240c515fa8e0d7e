"""Tests, verdicts and limits of the code sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, get_args

Level = Literal["strong", "standard", "basic"]
LEVELS: tuple[Level, ...] = ("strong", "standard", "basic")
"""Strongest first."""

Outcome = Literal["pass", "fail", "tle_cpu", "tle_idle", "crash", "infra"]
"""``tle_cpu``: over the CPU budget; ``tle_idle``: slept or stopped past the wall cap; ``infra``:
the sandbox's fault, not the program's, after retries."""

FLOAT_TOLERANCE = 1e-6
"""Absolute or relative, whichever is more; of numbers that are no integers."""


class SandboxUnavailableError(RuntimeError):
    """This machine cannot give the level that was asked for, or a sandbox cannot be kept up."""


class StoppedError(RuntimeError):
    """The caller stopped a program that was running."""

    def __init__(self) -> None:
        super().__init__("the program was stopped: nobody waits for its result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StdinTest:
    """The program is run as a script; what it prints must be ``stdout``."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A function of the program must return ``expected``.

    Args:
        call: ``name`` or ``Class.method``; a ``name`` that the program has not is looked for in
            its class ``Solution``.
        args: JSON values, by place or by name; a dict among those by place may have integers as
            keys.
        expected: what it must return; never enters the sandbox.
        in_place: it returns nothing: what counts is its first argument afterwards.
        or_list: a list with nothing but what is expected is right as well.
        nodes: LeetCode's ``ListNode`` or ``TreeNode`` for arguments, by place or name, and for the
            ``return``, that are lists here; ``*`` before it stands for a list of them.
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

    What they expect of the program stays outside where it is a literal (``grading.decode``). A
    hostile program can forge the success of the others, as they are checked where it is.

    Args:
        asserts: the source.
        prompt: source that the program goes on from: its imports and functions are there, and a
            program that is no more than the body of its last function completes it.
        stub: the function that the prompt only begins.
    """

    asserts: str
    prompt: str = ""
    stub: str = ""


Test = StdinTest | CallTest | AssertTest

_KINDS = {
    kind: (frozenset(f.name for f in fields(kind) if f.default is MISSING), {*kind.__slots__})
    for kind in get_args(Test)
}
"""Of each, the keys that it must and may have."""


def parse_test(data: Mapping[str, Any]) -> Test:
    """A test from its JSON object. Raises ``ValueError`` when it is of no known kind."""
    for kind, (needed, known) in _KINDS.items():
        if needed <= data.keys() <= known:
            return kind(**data)
    expected = " or ".join("{" + ", ".join(sorted(names)) + "}" for names, _ in _KINDS.values())
    raise ValueError(f"a test has the keys {sorted(data)}, expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """The outcome of one test.

    Args:
        verdict: of this test.
        cpu_s: CPU seconds that the program took.
        wall_s: seconds that it was there.
        detail: why it did not pass, in few words; partly the program's own.
        found: the beginning of what it printed or returned, where that was wrong.
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
        verdict: ``pass`` when all tests passed; ``infra`` when one was; else the first other one.
        tests: one result a test, in order; fewer when the run stopped early.
        level: the isolation that the program ran in; ``remote`` is whatever the service has.
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
    """What a program may use.

    Args:
        memory_mb: address space, in MiB.
        output_mb: standard output, standard error and result each, in MiB.
        idle_s: the wall cap is ``max(10 T, T + idle_s)`` for a budget of T CPU seconds.
    """

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
        """Seconds, less the wait for a core, that a budget of CPU seconds may stretch to."""
        return max(10.0 * budget_s, budget_s + self.idle_s)
