"""The reward for programs: what it finds in a response, how it scores, what it refuses."""

import sys
from dataclasses import replace

import pytest
from program_jobs import CRASH, IDLE, LOOP, RIGHT, WRONG, fenced

from case_files import read_table
from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest, GradingError, Scored
from rollpacker.reward.functions import resolve

if sys.platform != "linux":
    pytest.skip("the code sandbox needs Linux", allow_module_level=True)

from rollpacker.reward.code import CodeReward, read_options, row_tests

TESTS = [
    {"stdin": "1 2\n", "stdout": "3\n"},
    {"stdin": "0 0\n", "stdout": "0\n"},
    {"stdin": "5 6\n", "stdout": "11\n"},
]


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward({"idle_s": 0.5})


def ask(program: str, tests: object = TESTS, timeouts: tuple[float, ...] = ()) -> GradeRequest:
    return GradeRequest(
        attempt=AttemptId(0),
        prompt="p",
        completion=program,
        completion_ids=[],
        row={"tests": tests},
        timeouts_s=timeouts,
    )


@pytest.mark.parametrize(
    ("program", "verdict", "tests"),
    [
        (RIGHT, "pass", ("pass", "pass", "pass")),
        (WRONG, "fail", ("fail",)),
        (CRASH, "crash", ("crash",)),
        (LOOP, "tle_cpu", ("tle_cpu",)),
        (IDLE, "tle_idle", ("tle_idle",)),
    ],
)
def test_one_where_all_tests_pass(
    reward: CodeReward, program: str, verdict: str, tests: tuple[str, ...]
) -> None:
    scored = reward(ask(fenced(program), timeouts=(0.1, 0.2, 0.3)))
    assert scored.score == float(verdict == "pass")
    assert (scored.run.verdict, scored.run.tests) == (verdict, tests)
    assert len(scored.run.cpu_s) == len(tests)
    assert scored.run.timeout_s == pytest.approx(0.2)
    assert (scored.run.level, scored.run.forgeable) == ("standard", False)


def test_each_test_has_its_own_timeout(reward: CodeReward) -> None:
    waits = "n = int(input().split()[0])\nsum(range(n * 4_000_000))\nprint(n)"
    tests = [{"stdin": f"{n} 0\n", "stdout": f"{n}\n"} for n in (0, 3)]
    late = reward(ask(fenced(waits), tests, (0.05, 0.05)))
    assert late.run.tests == ("pass", "tle_cpu")
    assert reward(ask(fenced(waits), tests, (0.05, 5.0))).score == 1.0


def test_no_program_scores_zero_and_runs_nothing(reward: CodeReward) -> None:
    scored = reward(ask("I do not know", tests=None))
    assert scored.score == 0.0
    assert (scored.run.verdict, scored.run.tests, scored.run.cpu_s) == ("no_code", (), ())


def test_partial_credit_is_the_share_of_tests() -> None:
    reward = CodeReward({"partial_credit": True})
    scored = reward(ask(fenced(WRONG)))
    assert scored.score == pytest.approx(1 / 3)
    assert scored.run.tests == ("fail", "pass", "fail")
    assert reward(ask(fenced(RIGHT))).score == 1.0


def test_asserts_are_marked_as_forgeable(reward: CodeReward) -> None:
    tests = [{"asserts": "assert twice(2) > 3"}]
    scored = reward(ask(fenced("def twice(x):\n    return 2 * x"), tests))
    assert (scored.score, scored.run.forgeable) == (1.0, True)


@pytest.mark.parametrize("tests", [None, [], [{"stdin": "1"}], "[", [3]])
def test_rows_without_tests_are_no_fault_of_the_program(reward: CodeReward, tests: object) -> None:
    with pytest.raises(GradingError, match="the row's tests cannot be read"):
        reward(ask(fenced(RIGHT), tests))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *read_table(__file__, "test_wrong_options_are_one_line"),
        ({"float_tolerance": float("inf")}, "'float_tolerance': "),
        ({"float_tolerance": float("nan")}, "'float_tolerance': "),
    ],
)
def test_wrong_options_are_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=r"^rewards: options of 'code': ") as caught:
        read_options(options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_it_is_found_by_its_name() -> None:
    (scored,) = resolve("code", {"memory_mb": 256})([ask(fenced(RIGHT))])
    assert isinstance(scored, Scored)
    assert scored.score == 1.0


THIRD = [{"stdin": "", "stdout": "0.333333333\n"}]


@pytest.mark.parametrize(
    ("option", "column", "score"),
    [(None, None, 0.0), (1e-4, None, 1.0), (None, 1e-4, 1.0), (1e-4, 1e-9, 0.0), (1e-9, 1e-4, 1.0)],
)
def test_the_rows_tolerance_goes_before_the_rewards(
    option: float | None, column: float | None, score: float
) -> None:
    reward = CodeReward({"float_tolerance": option})
    request = replace(
        ask(fenced("print('0.33333')")), row={"tests": THIRD, "float_tolerance": column}
    )
    assert reward(request).score == score


@pytest.mark.parametrize("value", [0, -1e-6, float("nan"), float("inf"), "1e-6", True, [1e-6]])
def test_a_rows_tolerance_that_is_none_is_one_line(reward: CodeReward, value: object) -> None:
    request = replace(ask(fenced(RIGHT)), row={"tests": TESTS, "float_tolerance": value})
    with pytest.raises(GradingError, match="float_tolerance: expected a finite number above 0"):
        reward(request)


def test_a_report_has_every_test(reward: CodeReward) -> None:
    report = reward.explain(ask(f"```\nnote\n```\n{fenced(WRONG)}"))
    assert report.rule == "the only block marked as Python"
    assert report.program == WRONG + "\n" * (not WRONG.endswith("\n"))
    assert (report.score, report.column, report.level) == (0.0, "tests", "standard")
    assert [test.verdict for test in report.tests] == ["fail", "pass", "fail"]
    first, second, _ = report.tests
    assert (first.kind, first.given, first.expected) == ("stdin", repr("1 2\n"), repr("3\n"))
    assert (first.detail, first.found) == ("wrong output", repr("0\n"))
    assert (second.detail, second.found) == ("", "")
    assert all(0 < test.cpu_s < 10 for test in report.tests)


def test_a_report_of_calls_and_asserts_is_short(reward: CodeReward) -> None:
    call = {"call": "f", "args": [[1] * 1000], "expected": {"a": "x" * 1000}}
    program = fenced("def f(a): return {'b': 10 ** 5000, 'a': a[0]}")
    report = reward.explain(ask(program, [call, {"asserts": "assert f([1]) == 2"}]))
    called, asserted = report.tests
    assert called.given.startswith("f with [[1, 1, 1")
    assert called.found.startswith("{'b': <an integer of 16610 bits>, 'a': ")
    assert max(map(len, (called.given, called.expected, called.found))) < 400
    assert (asserted.kind, asserted.given) == ("asserts", repr("assert f([1]) == 2"))
    assert (asserted.verdict, asserted.detail) == ("fail", "wrong value: f([1]) == 2")


def test_a_report_without_a_program_says_why(reward: CodeReward) -> None:
    report = reward.explain(ask("```python\ncut"))
    assert (report.program, report.score, report.tests) == (None, 0.0, ())
    assert report.rule == "no complete fenced block of Python after </think>"
    assert report.column == "tests"
    with pytest.raises(GradingError, match="the row's tests cannot be read: tests: "):
        reward.explain(ask(fenced(RIGHT), tests=[3]))


def test_asserts_that_import_a_package_are_the_rows_fault(reward: CodeReward) -> None:
    row = {"test": "import math\nimport numpy as np\nfrom solution import f\nassert f(1)"}
    with pytest.raises(
        GradingError, match="the row's tests cannot be read: test: they import nump"
    ):
        reward(replace(ask(fenced("def f(x): return x")), row=row))
    row = {"test": "import math, pytest\nfrom solution import f\n    import numpy\nassert f(1)"}
    assert reward(replace(ask(fenced("def f(x): return x")), row=row)).score == 0.0


@pytest.mark.parametrize(
    ("asserts", "message"),
    read_table(__file__, "test_asserts_that_import_what_is_not_there_are_refused"),
)
def test_asserts_that_import_what_is_not_there_are_refused(asserts, message):
    row = {"test_list": [asserts], "prompt": "?"}
    if message is None:
        assert len(row_tests(row, remote=False)[1]) == 1
        return
    with pytest.raises(ValueError, match=message):
        row_tests(row, remote=False)
    assert row_tests(row, remote=True)


@pytest.mark.parametrize(
    ("asserts", "message"),
    [
        *read_table(__file__, "test_tests_that_say_nothing_of_a_program_are_the_rows_fault"),
        ("if f(1) == 0: pass\n" + "elif f(1) == 2: pass\n" * 1500 + "else: raise ValueError", None),
    ],
)
def test_tests_that_say_nothing_of_a_program_are_the_rows_fault(asserts, message):
    row = {"test": asserts, "prompt": "?"}
    for remote in (False, True):
        if message is None:
            assert row_tests(row, remote)
            continue
        with pytest.raises(ValueError, match=f"^test: {message}") as caught:
            row_tests(row, remote)
        assert "\n" not in str(caught.value)
