"""``make`` takes the Python that it is given, also where .venv is there already."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Stands for another installation of Python; makes environments without pip, which is slow.
OTHER = """#!/bin/bash
case "$2" in
*base_prefix*) echo another;;
venv) exec {python} -m venv --without-pip "$3";;
*) exec {python} "$@";;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_another_python_makes_the_environment_anew(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in (".ci", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    pip = tmp_path / "stub" / "pip"
    pip.mkdir(parents=True)
    (pip / "__main__.py").write_text("import sys; print('pip', *sys.argv[1:])")
    other = tmp_path / "other-python"
    other.write_text(OTHER.format(python=sys.executable))
    other.chmod(0o755)
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    for stamp in (".made", ".installed"):
        (venv / stamp).touch()

    def make(*words: str) -> str:
        command = ["make", ".venv/.installed", *words]
        env = os.environ | {"PYTHONPATH": str(pip.parent)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.stdout + done.stderr

    assert "up to date" in make()
    assert "up to date" in make(f"PYTHON={sys.executable}")
    assert "3.11 or later" in make("PYTHON=/bin/false")
    assert (venv / ".installed").exists()
    said = make(f"PYTHON={other}")
    assert "making .venv with" in said
    assert "--constraint requirements/constraints.txt --editable .[all]" in said
