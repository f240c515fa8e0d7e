"""Honest programs get the verdict that they earn."""

import sys
import threading

import pytest

from case_files import read_table
from rollpacker.sandbox import AssertTest, CallTest, Sandbox, StdinTest, Test, Verdict, parse_test
from rollpacker.sandbox.grading.decode import reveal

ADD = StdinTest(stdin="20 22\n", stdout="42\n")


def stdin(sandbox: Sandbox, program: str, test: StdinTest = ADD, timeout_s: float = 2.0) -> Verdict:
    return sandbox.run(program, [test], timeout_s)


READERS = read_table(__file__, "READERS")


@pytest.mark.parametrize("name", READERS)
def test_ways_to_read_and_write(sandbox: Sandbox, name: str) -> None:
    if name == "deep" and sys.version_info >= (3, 12):
        pytest.skip("this interpreter limits the recursion of functions in C by itself")
    found = stdin(sandbox, READERS[name])
    assert found.verdict == "pass", found


def test_a_library_module_that_is_not_loaded_yet_can_be_imported(sandbox: Sandbox) -> None:
    if sandbox.level == "basic":
        pytest.skip("nothing can be opened")
    assert stdin(sandbox, "import xml.dom.minidom, colorsys; print(42)").verdict == "pass"


def test_installed_packages_are_not_there(sandbox: Sandbox) -> None:
    assert stdin(sandbox, "import numpy; print(42)").verdict == "crash"


@pytest.mark.parametrize(("program", "verdict", "detail"), read_table(__file__, "test_verdicts"))
def test_verdicts(sandbox: Sandbox, program: str, verdict: str, detail: str) -> None:
    found = stdin(sandbox, program, timeout_s=0.2)
    assert found.verdict == verdict
    assert found.tests[0].detail.startswith(detail)
    assert len(found.tests[0].detail) <= 300
    assert found.level == sandbox.level
    assert not found.forgeable


def test_cpu_seconds_are_those_of_the_program(sandbox: Sandbox) -> None:
    found = stdin(
        sandbox, "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(0.2); print(42)"
    )
    assert found.verdict == "pass"
    assert 0.28 < found.cpu_s < 0.4
    assert found.tests[0].wall_s > 0.48


def test_a_program_that_is_just_over_its_budget_runs_again_alone(sandbox: Sandbox) -> None:
    # Within the budget whatever the noise, and over it, also alone.
    for share, verdict in ((0.8, "pass"), (1.05, "tle_cpu")):
        program = f"import time\nwhile time.process_time() < {0.25 * share}: pass\nprint(42)"
        assert stdin(sandbox, program, timeout_s=0.25).verdict == verdict


def test_load_makes_no_false_timeouts(sandbox: Sandbox) -> None:
    """By the wall clock, every one of these would be over its budget."""
    program = "import time\nwhile time.process_time() < 0.1: pass\nprint(42)"
    stop, burning = threading.Event(), threading.Barrier(7)

    def burn() -> None:
        with Sandbox(sandbox.level, check=False) as other:
            burning.wait(60.0)
            while not stop.is_set():
                stdin(other, "while True: pass", timeout_s=0.2)

    burners = [threading.Thread(target=burn) for _ in range(6)]
    for burner in burners:
        burner.start()
    burning.wait(60.0)
    found = [stdin(sandbox, program, timeout_s=0.2) for _ in range(2)]
    stop.set()
    for burner in burners:
        burner.join()
    assert [each.verdict for each in found] == ["pass"] * 2


CALLS: list[tuple[str, CallTest, str]] = [
    ("def f(a, b): return a + b", CallTest(call="f", args=[1, 2], expected=3), "pass"),
    ("def f(a): return (a, a)", CallTest(call="f", args=["x"], expected=["x", "x"]), "pass"),
    ("def f(): return {1: [2.5]}", CallTest(call="f", args=[], expected={"1": [2.5]}), "pass"),
    ("def f(): return 2 ** 5000", CallTest(call="f", args=[], expected=2**5000), "pass"),
    ("def f(): return -7", CallTest(call="f", args=[], expected=-7), "pass"),
    ("def f(): return 0.1 + 0.2", CallTest(call="f", args=[], expected=0.3), "pass"),
    ("def f(): return 3", CallTest(call="f", args=[], expected=3.0), "pass"),
    ("def f(): return float('inf')", CallTest(call="f", args=[], expected=float("inf")), "pass"),
    ("def f(): return True", CallTest(call="f", args=[], expected=1), "fail"),
    ("def f(): return '3'", CallTest(call="f", args=[], expected=3), "fail"),
    ("def f(): return {3}", CallTest(call="f", args=[], expected=[3]), "fail"),
    ("def f(): return {3}", CallTest(call="f", args=[], expected={3}), "pass"),
    ("def f(): return None", CallTest(call="f", args=[], expected=0), "fail"),
    ("def f(): return object()", CallTest(call="f", args=[], expected=0), "crash"),
    ("def g(): return 0", CallTest(call="f", args=[], expected=0), "crash"),
    ("def f(): print(1); return 0", CallTest(call="f", args=[], expected=0), "pass"),
    (
        "from collections import *\ndef f(a): return [Counter(a), deque(a) and OrderedDict(x=1)]",
        CallTest(call="f", args=["aab"], expected=[{"a": 2, "b": 1}, {"x": 1}]),
        "pass",
    ),
    (
        "class Solution:\n def two(self, a): return a[::-1]",
        CallTest(call="Solution.two", args=[[1, 2]], expected=[2, 1]),
        "pass",
    ),
    (
        "def f(): return '\\ud800'",
        CallTest(call="f", args=[], expected="\ud800"),
        "pass",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("program", "test", "verdict"), CALLS)
def test_calls(sandbox: Sandbox, program: str, test: CallTest, verdict: str) -> None:
    found = sandbox.run(program, [test], 2.0)
    assert found.verdict == verdict, found


@pytest.mark.parametrize(
    ("asserts", "code", "forgeable"),
    read_table(__file__, "test_what_asserts_expect_is_taken_out_of_them"),
)
def test_what_asserts_expect_is_taken_out_of_them(asserts: str, code: str, forgeable: bool) -> None:
    revealed = reveal(asserts)
    assert (code in revealed.code.splitlines(), revealed.forgeable) == (True, forgeable)


def test_verdicts_on_asserts(sandbox: Sandbox) -> None:
    plain = AssertTest(asserts="assert f(3) == 3")
    pytest_style = AssertTest(asserts="from solution import f\ndef test_a():\n    assert f(3) == 4")
    found = sandbox.run("def f(x): return x", [plain, pytest_style], 2.0)
    assert (found.verdict, found.passed, found.forgeable) == ("fail", 1, False)
    assert (found.tests[1].detail, found.tests[1].found) == ("wrong value: f(3) == 4", "3")
    loop = AssertTest(asserts="for n in [3]: assert f(n) == n")
    assert sandbox.run("def f(x): return x", [plain, loop], 2.0).forgeable


@pytest.mark.parametrize("report", read_table(__file__, "test_forged_reports_on_asserts"))
def test_forged_reports_on_asserts(sandbox: Sandbox, report: str) -> None:
    program = f"import os\nos.write(3, {report.encode()!r})\nos._exit(0)"
    test = AssertTest(asserts="assert f(3) == 3")
    assert sandbox.run(program, [test], 2.0).verdict == "fail"


def test_a_run_says_what_became_of_every_test(sandbox: Sandbox) -> None:
    tests: list[Test] = [ADD, StdinTest(stdin="1 1\n", stdout="3\n"), ADD]
    found = sandbox.run(READERS["input"], tests, 2.0)
    assert [each.verdict for each in found.tests] == ["pass", "fail", "pass"]
    assert (found.verdict, found.passed) == ("fail", 2)
    assert len(sandbox.run(READERS["input"], tests, 2.0, stop_early=True).tests) == 2


def test_runs_are_the_same_every_time(sandbox: Sandbox) -> None:
    letters = "list({'a', 'b', 'c', 'd', 'e', 'f'})"
    program = f"import random\nraise ValueError({letters}, hash('x'), random.random())"
    with Sandbox(sandbox.level, check=False) as other:
        details = {stdin(each, program).tests[0].detail for each in (sandbox, other, sandbox)}
    assert len(details) == 1
    assert "'f'" in details.pop()


def test_every_test_may_have_a_budget_of_its_own(sandbox: Sandbox) -> None:
    program = "import time\nwhile time.process_time() < 0.2: pass\nprint(42)"
    found = sandbox.run(program, [ADD, ADD], [0.05, 2.0])
    assert [each.verdict for each in found.tests] == ["tle_cpu", "pass"]
    with pytest.raises(ValueError, match="2 tests and timeout_s="):
        sandbox.run(program, [ADD, ADD], [1.0])


class Text(str):
    """As frameworks and enumerations have them."""

    __slots__ = ()

    def __str__(self) -> str:
        return "another text"


def test_subclasses_of_str_are_the_text_that_they_hold(sandbox: Sandbox) -> None:
    program = Text("def f(x): return x + 'b'\nif __name__ == '__main__': print(f(input()))")
    tests: list[Test] = [
        StdinTest(stdin=Text("a"), stdout=Text("ab")),
        CallTest(call=Text("f"), args=[Text("a")], expected="ab"),
        AssertTest(asserts=Text("assert f('a') == 'ab'")),
    ]
    assert [each.verdict for each in sandbox.run(program, tests, 2.0).tests] == ["pass"] * 3


@pytest.mark.parametrize(
    ("program", "test", "message"),
    [
        (b"pass", ADD, "^a program must be text, got bytes$"),
        ("pass", StdinTest(stdin=5, stdout=""), "^a test's stdin must be text, got int$"),  # type: ignore[arg-type]
        ("pass", AssertTest(asserts=None), "^a test's asserts must be text, got NoneType$"),  # type: ignore[arg-type]
        ("pass", CallTest(call=5, args=[], expected=0), "^a test's call must be text, got int$"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_text_is_named(sandbox: Sandbox, program: str, test: Test, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sandbox.run(program, [test], 1.0)


def test_mistakes_are_explained(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="needs tests"):
        sandbox.run("pass", [], 1.0)
    with pytest.raises(ValueError, match="timeout_s > 0"):
        sandbox.run("pass", [ADD], 0.0)
    with pytest.raises(ValueError, match="must be JSON values"):
        sandbox.run("pass", [CallTest(call="f", args=[sys], expected=0)], 1.0)
    with pytest.raises(ValueError, match=r"keys \['stdin'\], expected"):
        parse_test({"stdin": ""})
    with pytest.raises(ValueError, match="a level of strong, standard, basic"):
        Sandbox("weak")  # type: ignore[arg-type]
