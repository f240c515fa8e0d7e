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
        {"asserts": "assert add(1, 2) > 2"},
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


@pytest.mark.parametrize(
    "tests",
    [
        *([], {}, [3], [{"stdin": ""}]),
        [{"stdin": "", "stdout": 5}],
        [{"stdin": 5, "stdout": ""}],
        [{"call": "f", "args": 5, "expected": 5}],
        [{"call": "f", "args": "ab", "expected": 5}],
    ],
)
def test_run_explains_bad_tests(tmp_path: Path, tests: object) -> None:
    done = cli.invoke(sandbox_app, ["run", *write(tmp_path, "pass", tests)])
    assert isinstance(done.exception, ValueError)
    assert "t.json: " in str(done.exception)


def test_run_explains_tests_that_are_nested_too_deeply(tmp_path: Path) -> None:
    options = write(tmp_path, "pass", [])
    (tmp_path / "t.json").write_text("[" * 100_000)
    done = cli.invoke(sandbox_app, ["run", *options])
    assert str(done.exception).startswith(f"{tmp_path / 't.json'}: not JSON: ")


def test_run_names_the_file_or_the_flag(tmp_path: Path) -> None:
    options = write(tmp_path, "pass", [{"stdin": "", "stdout": ""}])
    for timeout in ("1e9", "inf", "nan", "0"):
        done = cli.invoke(sandbox_app, ["run", *options, "--timeout", timeout])
        assert str(done.exception) == (
            f"--timeout: expected CPU seconds above 0 and at most 86400, got {float(timeout):g}"
        )
    done = cli.invoke(sandbox_app, ["selftest", "--timeout", "1e9"])
    assert str(done.exception).startswith("--timeout: expected CPU seconds above 0")
    for name in ("p.py", "t.json"):
        options = write(tmp_path, "pass", [{"stdin": "", "stdout": ""}])
        (tmp_path / name).write_bytes(b"x = '\xff'")
        done = cli.invoke(sandbox_app, ["run", *options])
        expected = f"{tmp_path / name}: not UTF-8: invalid start byte at byte 5"
        assert str(done.exception) == expected


def test_run_reads_a_byte_order_mark(tmp_path: Path, level: Level) -> None:
    options = write(tmp_path, "print(3)", [{"stdin": "", "stdout": "3"}])
    for name in ("p.py", "t.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    assert cli.invoke(sandbox_app, ["run", *options, "--level", level]).exit_code == 0


def test_levels_are_checked() -> None:
    done = cli.invoke(sandbox_app, ["selftest", "--level", "stronger"])
    assert str(done.exception) == (
        "--level: unknown level 'stronger': expected strong, standard, basic"
    )
