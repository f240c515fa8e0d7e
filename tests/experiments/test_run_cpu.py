"""One figure of the smallest kind, from its command to its page."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from run_cpu import main

ROOT = Path(__file__).parents[2]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "experiments" / "run_cpu.py", *words]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=os.environ
    )


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., object]:
    """What the command, in this process, leaves with; its folder stays empty."""
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> object:
        monkeypatch.setattr(sys, "argv", ["run_cpu.py", *map(str, words), "--out", str(tmp_path)])
        with pytest.raises(SystemExit) as left:
            main()
        assert not list(tmp_path.iterdir())
        return left.value.code

    return call


def test_an_unknown_figure_is_refused_before_any_work(
    refused: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused("fig99") == 2
    said = "no runs of fig99: choose from fig9, fig11, fig13, table3"
    assert said in capsys.readouterr().err


def test_an_unknown_arm_is_refused_before_any_work(refused: Callable[..., object]) -> None:
    assert "table3 has no arm 'fixed 41%': none, fixed 20%" in str(
        refused("table3", "--arm", "fixed 41%")
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_figure_from_its_command_to_its_page(tmp_path: Path) -> None:
    small = ("steps=2", "data.options.size=40", "rollout.max_completion_length=80")
    arms = ("--arm", "none", "--arm", "fixed 40%")
    given = ("--repeats", 1, "--out", tmp_path, "--pages", tmp_path / "pages")
    done = run("table3", *arms, *given, *small)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "pages" / "table3" / "cpu.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    assert rows == ["", "---", "none", "fixed 40%"]
    folders = sorted(path.name for path in (tmp_path / "table3").iterdir())
    assert folders == ["0-fixed-40-", "0-none"]
    assert page.splitlines()[4] in done.stdout
    again = run("table3", *arms, *given, "--again")
    assert (tmp_path / "pages" / "table3" / "cpu.md").read_text(encoding="utf-8") == page, again
