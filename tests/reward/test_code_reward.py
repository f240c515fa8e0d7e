"""The reward for programs: what it finds in a response, how it scores, what it refuses."""

import sys

import pytest
from program_jobs import CRASH, IDLE, LOOP, RIGHT, WRONG, fenced

from rollpacker.core.types import AttemptId
from rollpacker.reward.base import GradeRequest, GradingError, Scored
from rollpacker.reward.functions import resolve

if sys.platform != "linux":
    pytest.skip("the code sandbox needs Linux", allow_module_level=True)

from rollpacker.reward.code import CodeReward, last_program, read_options

TESTS = [
    {"stdin": "1 2\n", "stdout": "3\n"},
    {"stdin": "0 0\n", "stdout": "0\n"},
    {"stdin": "5 6\n", "stdout": "11\n"},
]


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("", None),
        ("print(1)", None),
        ("```python\nprint(1)", None),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```\nprint(1)\n```", "print(1)\n"),
        ("```py\r\nprint(1)\r\n```\r\n", "print(1)\n"),
        ("```Python3 \n\n  x = 1\n```", "\n  x = 1\n"),
        ("```cpp\nint x;\n```", None),
        ("```python\na\n```\nout:\n```text\n1\n```", "a\n"),
        ("```python\na\n```\nbetter:\n```python\nb\n```", "b\n"),
        ("```python\na\n```\ncut:\n```python\nb", "a\n"),
        ("````python\ns = '''\n```\nx\n```\n'''\n````", "s = '''\n```\nx\n```\n'''\n"),
        ("```python\nthought\n```</think>", None),
        ("```python\nold\n```</think>now\n```python\nnew\n```", "new\n"),
        ("```python\n```", "\n"),
        ('```python title="a.py"\na\n```\n```text\nb\n```', "a\n"),
        ("```python\ns = '\u2028\x0c'\n```", "s = '\u2028\x0c'\n"),
        ("so: ```python\nprint(1)\n```", None),
    ],
)
def test_the_last_program_is_found(completion: str, program: str | None) -> None:
    assert last_program(completion) == program


def test_finding_a_program_takes_linear_time() -> None:
    assert last_program("```python\n" * 100_000 + "`" * 200_000) is None
    assert last_program("```" + " " * 500_000 + "`\n" + "```" + " " * 500_000) is None


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
    tests = [{"asserts": "assert twice(2) == 4"}]
    scored = reward(ask(fenced("def twice(x):\n    return 2 * x"), tests))
    assert (scored.score, scored.run.forgeable) == (1.0, True)


@pytest.mark.parametrize("tests", [None, [], [{"stdin": "1"}], "[", [3]])
def test_rows_without_tests_are_no_fault_of_the_program(reward: CodeReward, tests: object) -> None:
    with pytest.raises(GradingError, match="the row's tests cannot be read"):
        reward(ask(fenced(RIGHT), tests))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levle": "basic"}, "unknown key 'levle'; did you mean 'level'?"),
        ({"level": "weak"}, "'level': must be 'strong', 'standard' or 'basic', got 'weak'"),
        ({"memory_mb": 10}, "'memory_mb': must be at least 128, got 10"),
        ({"partial_credit": "often"}, "'partial_credit': must be true or false"),
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
