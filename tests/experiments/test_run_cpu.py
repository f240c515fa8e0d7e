"""One figure of the smallest kind, from its command to its page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "experiments" / "run_cpu.py", *words]
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env=os.environ
    )


def test_an_unknown_figure_is_refused_before_any_work(tmp_path: Path) -> None:
    done = run("fig99", "--out", tmp_path)
    assert done.returncode == 2
    assert "no runs of fig99: choose from fig11, fig13, fig9, table3" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_figure_from_its_command_to_its_page(tmp_path: Path) -> None:
    small = ("steps=2", "data.options.size=40", "rollout.max_completion_length=80")
    done = run("table3", "--repeats", 1, "--out", tmp_path, "--pages", tmp_path / "pages", *small)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "pages" / "table3" / "cpu.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    arms = ["none", "fixed 20%", "fixed 30%", "fixed 40%", "adaptive", "consolidate"]
    assert rows[2:] == arms
    assert sorted(path.name for path in (tmp_path / "table3").iterdir())[0] == "0-adaptive"
    assert page in done.stdout or page.splitlines()[0] in done.stdout
