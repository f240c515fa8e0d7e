import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollpacker.cli.sandbox import sandbox_app
from rollpacker.sandbox import Level

cli = CliRunner()


def write(folder: Path, program: str, tests: object) -> list[str]:
    (folder / "p.py").write_text(program)
    (folder / "t.json").write_text(json.dumps(tests))
    return [str(folder / "p.py"), "--tests", str(folder / "t.json")]


def test_run(tmp_path: Path, level: Level) -> None:
    tests = [
        {"stdin": "1 2\n", "stdout": "3\n"},
        {"call": "add", "args": [1, 2], "expected": 3},
        {"asserts": "assert add(1, 2) == 3"},
    ]
    program = (
        "def add(a, b): return a + b\n"
        "if __name__ == '__main__': print(add(*map(int, input().split())))"
    )
    options = [*write(tmp_path, program, tests), "--level", level]
    done = cli.invoke(sandbox_app, ["run", *options, "--json"])
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["verdict"] == "pass"
    assert found["level"] == level
    assert found["forgeable"] is True
    assert [each["verdict"] for each in found["tests"]] == ["pass"] * 3
    assert 0.0 < found["cpu_s"] < 1.0
    shown = cli.invoke(sandbox_app, ["run", *options])
    assert shown.stdout.startswith("pass: 3 of 3 passed")


def test_run_fails_with_its_program(tmp_path: Path, level: Level) -> None:
    options = write(tmp_path, "while True: pass", [{"stdin": "", "stdout": ""}])
    done = cli.invoke(
        sandbox_app, ["run", *options, "--timeout", "0.1", "--level", level, "--json"]
    )
    assert done.exit_code == 1
    assert json.loads(done.stdout)["verdict"] == "tle_cpu"


@pytest.mark.parametrize("tests", [[], {}, [3], [{"stdin": ""}]])
def test_run_explains_bad_tests(tmp_path: Path, tests: object) -> None:
    done = cli.invoke(sandbox_app, ["run", *write(tmp_path, "pass", tests)])
    assert isinstance(done.exception, ValueError)
    assert "t.json: " in str(done.exception)


def test_bench(level: Level) -> None:
    done = cli.invoke(
        sandbox_app,
        ["bench", "--executions", "40", "--zygotes", "1", "--level", level, "--json"],
    )
    found = json.loads(done.stdout)
    assert found["level"] == level
    assert 0.0 < found["p50_ms"] <= found["p99_ms"]
    assert found["executions_per_s"] > 1.0
    # 1.9 where it was measured; a slow machine may take several times as long.
    assert 0.2 < found["cpu_ms_per_execution"] < 20.0
    ratio = found["cpu_ms_per_subprocess"] / found["cpu_ms_per_execution"]
    assert found["times_cheaper"] == pytest.approx(ratio)
    # About 4, less where caches are shared with others that are busy.
    assert found["times_cheaper"] > 1.5


def test_levels_are_checked() -> None:
    done = cli.invoke(sandbox_app, ["bench", "--level", "stronger"])
    assert str(done.exception) == (
        "--level: unknown level 'stronger': expected strong, standard, basic"
    )
