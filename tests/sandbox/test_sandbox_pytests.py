"""The stand-in for pytest gives the outcomes of pytest itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.sandbox import AssertTest, Sandbox

PROGRAM = "def half(n):\n    if n < 0: raise ValueError('below zero')\n    return n / 2\n"
HEAD = "import pytest\nimport unittest\nfrom solution import half\n"
RIGHT = {
    "plain": "def test_a(): assert half(4) == 2",
    "raises": "def test_a():\n    with pytest.raises(ValueError, match='zero') as e: half(-1)\n"
    "    assert 'below' in str(e.value)",
    "raises called": "def test_a(): pytest.raises(ValueError, half, -1)",
    "raises one of": "def test_a():\n    with pytest.raises((KeyError, ValueError)): half(-1)",
    "approx": "def test_a():\n    assert half(0.2) == pytest.approx(0.1)\n"
    "    assert [half(1), half(2)] == pytest.approx([0.5, 1.0000001])\n"
    "    assert {'a': half(1)} == pytest.approx({'a': 0.6}, abs=0.2)",
    "parametrize": "@pytest.mark.parametrize('n, h', [(2, 1), (4, 2)])\n"
    "def test_a(n, h): assert half(n) == h",
    "parametrize one": "@pytest.mark.parametrize('n', [2, pytest.param(4, id='four')])\n"
    "def test_a(n): assert half(n) * 2 == n",
    "parametrize list": "@pytest.mark.parametrize(['n', 'h'], [(2, 1)])\n"
    "def test_a(n, h): assert half(n) == h",
    "parametrize twice": "seen = []\n@pytest.mark.parametrize('a', [1, 2])\n"
    "@pytest.mark.parametrize('b', [3, 4])\ndef test_a(a, b): seen.append((a, b))\n"
    "def test_b(): assert len(seen) == 4",
    "fixture": "@pytest.fixture\ndef base(): return 2\n@pytest.fixture()\ndef four(base):\n"
    "    yield base * 2\ndef test_a(four): assert half(four) == 2",
    "class": "class TestHalf:\n    def setup_method(self): self.n = 4\n"
    "    def test_a(self): assert half(self.n) == 2",
    "unittest": "class Half(unittest.TestCase):\n    def setUp(self): self.n = 4\n"
    "    def test_a(self): self.assertEqual(half(self.n), 2)",
    "skip": "def test_a(): pass\ndef test_b(): pytest.skip('not here')",
    "other marks": "@pytest.mark.slow\n@pytest.mark.timeout(5)\ndef test_a(): assert half(2) == 1",
}
WRONG = {
    "plain": "def test_a(): assert half(4) == 3",
    "second": "def test_a(): pass\ndef test_b(): assert half(4) == 3",
    "raises nothing": "def test_a():\n    with pytest.raises(ValueError): half(1)",
    "raises another": "def test_a():\n    with pytest.raises(KeyError): half(-1)",
    "no match": "def test_a():\n    with pytest.raises(ValueError, match='above'): half(-1)",
    "approx": "def test_a(): assert half(0.2) == pytest.approx(0.11)",
    "approx length": "def test_a(): assert [half(2)] == pytest.approx([1, 1])",
    "parametrize": "@pytest.mark.parametrize('n, h', [(2, 1), (4, 3)])\n"
    "def test_a(n, h): assert half(n) == h",
    "class": "class TestHalf:\n    def test_a(self): assert half(4) == 3",
    "unittest": "class Half(unittest.TestCase):\n"
    "    def test_a(self): self.assertEqual(half(4), 3)",
    "no such fixture": "def test_a(nothing): pass",
    "fail": "def test_a(): pytest.fail('always')",
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(sandbox: Sandbox, name: str) -> None:
    found = sandbox.run(PROGRAM, [AssertTest(asserts=HEAD + RIGHT[name])], 2.0)
    assert found.verdict == "pass", found


@pytest.mark.parametrize("name", WRONG)
def test_wrong(sandbox: Sandbox, name: str) -> None:
    found = sandbox.run(PROGRAM, [AssertTest(asserts=HEAD + WRONG[name])], 2.0)
    assert found.verdict in ("fail", "crash")


def test_pytest_agrees(tmp_path: Path) -> None:
    (tmp_path / "solution.py").write_text(PROGRAM)
    for kind, tests in (("right", RIGHT), ("wrong", WRONG)):
        for place, code in enumerate(tests.values()):
            (tmp_path / f"test_{kind}_{place}.py").write_text(HEAD + code)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    broken = {line.split()[1].split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert broken == {f"test_wrong_{place}.py" for place in range(len(WRONG))}, done.stdout
