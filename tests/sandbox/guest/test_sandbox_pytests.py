"""The stand-in for pytest gives the outcomes of pytest itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from case_files import read_table
from rollpacker.sandbox import AssertTest, Sandbox

PROGRAM = "def half(n):\n    if n < 0: raise ValueError('below zero')\n    return n / 2\n"
PROGRAM += "def ask(): return int(input())\n"
HEAD = "import pytest\nimport unittest\nfrom solution import ask, half\n"
RIGHT = read_table(__file__, "RIGHT")
WRONG = read_table(__file__, "WRONG")


@pytest.mark.parametrize("name", RIGHT)
def test_right(sandbox: Sandbox, name: str) -> None:
    found = sandbox.run(PROGRAM, [AssertTest(asserts=HEAD + RIGHT[name])], 2.0)
    assert found.verdict == "pass", found


@pytest.mark.parametrize("name", WRONG)
def test_wrong(sandbox: Sandbox, name: str) -> None:
    found = sandbox.run(PROGRAM, [AssertTest(asserts=HEAD + WRONG[name])], 2.0)
    assert found.verdict in ("fail", "crash")


ALONE = read_table(__file__, "ALONE")


@pytest.mark.parametrize("name", ALONE)
def test_a_file_in_which_no_test_is_run_does_not_pass(sandbox: Sandbox, name: str) -> None:
    program = "def half(n): raise ValueError\ndef ask(): ..."
    found = sandbox.run(program, [AssertTest(asserts=HEAD + ALONE[name])], 2.0)
    assert found.verdict in ("fail", "crash")


def test_a_bare_main_leaves_the_tests_to_be_run(sandbox: Sandbox) -> None:
    for half, verdict in ((1, "pass"), (2, "fail")):
        code = f"{HEAD}class Half(unittest.TestCase):\n    def test_a(self): "
        code += f"self.assertEqual(half(2), {half})\nunittest.main()\n"
        assert sandbox.run(PROGRAM, [AssertTest(asserts=code)], 2.0).verdict == verdict


def test_pytest_agrees(tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_text(PROGRAM)
    for kind, tests in (("right", RIGHT), ("wrong", WRONG)):
        for place, code in enumerate(tests.values()):
            (tmp_path / f"test_{kind}_{place}.py").write_text(HEAD + code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    broken = {
        line.split()[1].split("::")[0]
        for line in done.stdout.splitlines()
        if line[:5] in ("FAILE", "ERROR")
    }
    assert broken == {f"test_wrong_{place}.py" for place in range(len(WRONG))}, done.stdout
