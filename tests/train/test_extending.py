"""Adds an algorithm by following docs/extending.md, in a copy of the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^    ```(\w+) title=\"([^\"]+)\"\n(.*?)^    ```$", re.M | re.S)


def follow(page: str, root: Path) -> list[str]:
    """Write the page's files and make its changes; the paths."""
    paths: list[str] = []
    for language, path, body in BLOCK.findall(page):
        text = textwrap.dedent(body) if language == "python" else _unindented(body)
        file = root / path
        if language == "diff":
            lines = text.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            code = file.read_text()
            assert code.count(old) == 1, f"{path}: the page is out of date:\n{old}"
            text = code.replace(old, new)
        file.write_text(text)
        paths.append(path)
    return paths


def _unindented(body: str) -> str:
    lines = [line[4:] if line.strip() else " \n" for line in body.splitlines(keepends=True)]
    return "".join(lines)


def test_an_algorithm_is_one_file_its_configuration_and_one_line(tmp_path: Path) -> None:
    for folder in ("src/rollpacker", "tests/train"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    paths = follow((ROOT / "docs" / "extending.md").read_text(), tmp_path)
    assert len(paths) == 5
    options = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-k"]
    names = "median or configured_and_built"
    done = subprocess.run(
        [sys.executable, *options, names, "tests/train/test_algorithms.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    style = [sys.executable, "-m", "ruff"]
    for check in (["check"], ["format", "--check"]):
        config = ["--config", str(ROOT / "pyproject.toml")]
        ruff = subprocess.run(
            [*style, *check, *config, *(path for path in paths if path.startswith("src"))],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ruff.returncode == 0, ruff.stdout
