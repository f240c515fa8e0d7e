"""Names that programs may use without importing them, and how far they reach."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from case_files import read_table
from rollpacker.sandbox import LEVELS, AssertTest, CallTest, Level, Sandbox, StdinTest, Test
from rollpacker.sandbox.guest import prelude

LEETCODE = """
class Solution:
    def f(self, nums: List[int], k: Optional[int] = None) -> Dict[int, int]:
        heapify(nums)
        seen = defaultdict(int)
        for n, _ in groupby(sorted(nums)):
            seen[n] = bisect.bisect_left(nums, n) + floor(pi) + inf.__class__(0)
        return {n: int(v) for n, v in seen.items()} or math.gcd(4, 6)
"""
PLAIN = StdinTest(stdin="1 2\n", stdout="3\n")


@pytest.fixture(scope="module", params=LEVELS)
def at_level(request: pytest.FixtureRequest, level: Level) -> Iterator[Sandbox]:
    if LEVELS.index(request.param) < LEVELS.index(level):
        pytest.skip("does not work on this machine")
    with Sandbox(request.param, check=False) as made:
        yield made


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (LEETCODE, CallTest(call="f", args=[[2, 1]], expected={"1": 3, "2": 4})),
        ("print(sum(map(int, stdin.readline().split())))", PLAIN),
        ("stdout.write(str(reduce(add, map(int, input().split()))))", PLAIN),
        ("def pow(a, b): return a + b\nprint(pow(*map(int, input().split())))", PLAIN),
        ("add = 3\nprint(add)", PLAIN),
        ("from math import *\nprint(3 if pow(2, 2) == 4.0 else 0)", PLAIN),
        ("from __future__ import annotations\ndef f(x: Nothing): ...\nprint(3)", PLAIN),
        ("import builtins\nbuiltins.print = lambda x: stdout.write('3')\nprint(4)", PLAIN),
        ("def d(n): return n and 1 + d(n - 1)\nprint(d(20_000) - 19_997)", PLAIN),
        ("print(3 if 'add' not in globals() else 0)", PLAIN),
        ("def f(x: List[int]): return x", AssertTest(asserts="assert f(1) == 1")),
        ("def f(x: Pattern[str]): return x", AssertTest(asserts="assert f(1) == 1")),
    ],
)
def test_what_programs_may_use(at_level: Sandbox, program: str, test: Test) -> None:
    found = at_level.run(program, [test], 5.0)
    assert (found.verdict, found.tests[0].detail) == ("pass", "")


@pytest.mark.parametrize(
    ("program", "test", "detail"),
    [
        ("x = 1", CallTest(call="add", args=[1, 2], expected=3), "the program has no 'add'"),
        ("x = 1", AssertTest(asserts="assert add(1, 2) == 3"), "name 'add' is not defined"),
        ("x = 1", AssertTest(asserts="from solution import add"), "cannot import name 'add'"),
        ("print(addd)", PLAIN, "name 'addd' is not defined"),
        ("x = 1\n\nif :", PLAIN, "SyntaxError: invalid syntax (<program>, line 3)"),
    ],
)
def test_what_they_do_not_hide(at_level: Sandbox, program: str, test: Test, detail: str) -> None:
    found = at_level.run(program, [test], 5.0)
    assert found.verdict == "crash"
    assert detail in found.tests[0].detail


HEAD = 'import math\n\ndef helper(x):\n    return x + 1\n\n\ndef f(x):\n    """One more."""\n'


@pytest.mark.parametrize(
    ("program", "verdict"), read_table(__file__, "test_a_program_may_go_on_from_its_prompt")
)
def test_a_program_may_go_on_from_its_prompt(sandbox: Sandbox, program: str, verdict: str) -> None:
    test = AssertTest(asserts="assert f(1) == 2", prompt=HEAD, stub="f")
    assert sandbox.run(program, [test], 5.0).verdict == verdict


@pytest.mark.parametrize("prompt", ["Write f:\nfrom here on", "import numpy\ndef f(x):\n    ..."])
def test_a_prompt_that_is_no_program_does_not_matter(sandbox: Sandbox, prompt: str) -> None:
    test = AssertTest(asserts="assert f(1) == 2", prompt=prompt, stub="f")
    assert sandbox.run("def f(x): return x + 1", [test], 5.0).verdict == "pass"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("def f(a): a.reverse()", "pass"),
        ("def f(a):\n    a.reverse()\n    return None", "pass"),
        ("def f(a): return a[::-1]", "fail"),
        ("def f(a): a = a[::-1]", "fail"),
    ],
)
def test_functions_that_change_their_argument(sandbox: Sandbox, program: str, verdict: str) -> None:
    test = CallTest(call="f", args=[[1, 2]], expected=[2, 1], in_place=True)
    assert sandbox.run(program, [test], 5.0).verdict == verdict


def test_arguments_by_name(sandbox: Sandbox) -> None:
    test = CallTest(call="f", args={"b": 1, "a": 3}, expected=2)
    assert sandbox.run("def f(a, b): return a - b", [test], 5.0).verdict == "pass"
    assert sandbox.run("def f(x, y): return x - y", [test], 5.0).verdict == "crash"


def test_the_modules_are_loaded_before_any_program(sandbox: Sandbox) -> None:
    program = "import sys\nprint(all(name in sys.modules for name in input().split()))"
    test = StdinTest(stdin=" ".join(prelude._MODULES), stdout="True")
    assert sandbox.run(program, [test], 5.0).verdict == "pass"
    assert sys.getrecursionlimit() < prelude._DEEP  # of this process: nothing is installed here


def test_names_that_a_module_makes_as_they_are_asked_for() -> None:
    """As typing does with some of its own since Python 3.13."""
    module = ModuleType("lazy")
    vars(module).update(__all__=["made"], __getattr__={"made": 3}.__getitem__)
    assert prelude._public(module) == {"made": 3}
