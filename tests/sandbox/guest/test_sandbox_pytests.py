"""The stand-in for pytest gives the outcomes of pytest itself."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollpacker.sandbox import AssertTest, Sandbox

PROGRAM = "def half(n):\n    if n < 0: raise ValueError('below zero')\n    return n / 2\n"
PROGRAM += "def ask(): return int(input())\n"
HEAD = "import pytest\nimport unittest\nfrom solution import ask, half\n"
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
    "skip marks": "def test_a(): pass\n@pytest.mark.skip\ndef test_b(): assert 0\n"
    "@pytest.mark.skipif(True, reason='?')\ndef test_c(): assert 0\n"
    "@pytest.mark.skipif(False, reason='?')\ndef test_d(): assert half(2) == 1",
    "expected to fail": "def test_a(): pass\n@pytest.mark.xfail\ndef test_b(): assert 0\n"
    "@pytest.mark.xfail(raises=ValueError)\ndef test_c(): half(-1)\n"
    "@pytest.mark.xfail\ndef test_d(): assert half(2) == 1\n"
    "@pytest.mark.parametrize('n', [2, pytest.param(1, marks=pytest.mark.xfail)])\n"
    "def test_e(n): assert half(n) == 1",
    "match": "def test_a():\n    with pytest.raises(ValueError) as e: half(-1)\n"
    "    assert e.type is ValueError and e.match('below')",
    "warns": "import warnings\ndef test_a():\n    with pytest.warns(UserWarning, match='old'):\n"
    "        warnings.warn('old')",
    "monkeypatch": "import builtins, io, os, sys\ndef test_a(monkeypatch):\n"
    "    monkeypatch.setattr('builtins.input', lambda: '4')\n"
    "    monkeypatch.setattr(os.path, 'sep', '|')\n    monkeypatch.setenv('X', 1)\n"
    "    monkeypatch.setattr(sys, 'stdin', io.StringIO('5\\n'))\n"
    "    assert half(ask()) == 2 and os.path.sep == '|' and os.environ['X'] == '1'\n"
    "def test_b(): assert os.path.sep == '/' and 'X' not in os.environ",
    "capsys": "def test_a(capsys):\n    print('hi')\n"
    "    assert capsys.readouterr().out == 'hi\\n' and not capsys.readouterr().out",
    "fixture with params": "seen = []\n@pytest.fixture(params=[2, 4])\ndef n(request):\n"
    "    yield request.param\n@pytest.fixture\ndef m(n): return n\n"
    "def test_a(n, m):\n    seen.append(n)\n    assert half(m) * 2 == n\n"
    "def test_b(): assert seen == [2, 4]",
    "fixtures of a scope": "seen = []\n@pytest.fixture(autouse=True, scope='module')\n"
    "def once(): seen.append(1)\n@pytest.fixture(autouse=True)\ndef each():\n"
    "    seen.append(2)\n    yield\n    seen.append(3)\ndef test_a(): pass\n"
    "def test_b(): assert seen == [1, 2, 3, 2]",
    "fixtures that are used": "seen = []\n@pytest.fixture(name='four')\n"
    "def make(): seen.append(4)\n@pytest.mark.usefixtures('four')\nclass TestA:\n"
    "    def test_a(self): assert seen == [4]",
    "class inside": "class TestA:\n    class TestB:\n        def test_a(self): assert half(2) == 1",
    "class of parameters": "@pytest.mark.parametrize('n', [2, 4])\nclass TestA:\n"
    "    @classmethod\n    def setup_class(cls): cls.half = 1\n"
    "    def test_a(self, n): assert half(n) >= self.half",
    "patches": "from unittest import mock\n@mock.patch('builtins.input', return_value='4')\n"
    "def test_a(asked): assert half(ask()) == 2 and asked.called",
    "main": "class Half(unittest.TestCase):\n    def test_a(self): self.assertEqual(half(2), 1)\n"
    "if __name__ == '__main__': unittest.main()",
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
    "class inside": "class TestA:\n    class TestB:\n        def test_a(self): assert half(2) == 2",
    "marked to fail, strictly": "@pytest.mark.xfail(strict=True)\ndef test_a(): pass",
    "another failure": "@pytest.mark.xfail(raises=KeyError)\ndef test_a(): half(-1)",
    "condition": "@pytest.mark.xfail(False, reason='?')\ndef test_a(): assert 0",
    "warns nothing": "def test_a():\n    with pytest.warns(UserWarning): half(2)",
    "class of parameters": "@pytest.mark.parametrize('n', [2, 4])\nclass TestA:\n"
    "    def test_a(self, n): assert half(n) == 1",
    "fixture with params": "@pytest.fixture(params=[2, 4])\ndef n(request): return request.param\n"
    "def test_a(n): assert half(n) == 1",
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


ALONE = {
    "all skipped": "def test_a(): pytest.skip()",
    "expected to fail": "@pytest.mark.xfail\ndef test_a(): assert half(2) == 1, half(3) == 2",
    "no values": "@pytest.mark.parametrize('n', [])\ndef test_a(n): pass",
    "async": "async def test_a(): assert half(2) == 2",
    "skipped case": "class Half(unittest.TestCase):\n"
    "    @unittest.skip('?')\n    def test_a(self): 0",
    "case that skips itself": "class Half(unittest.TestCase):\n"
    "    @classmethod\n    def setUpClass(cls): raise unittest.SkipTest('?')\n"
    "    def test_a(self): 0",
}


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
