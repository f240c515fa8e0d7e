"""The driver's benchmark: real policies, pump and logs over workers that are stand-ins."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["off", "exact", "race"])
def test_a_step_is_measured(mode: str) -> None:
    small = ("--attempts", "64", "--workers", "4", "--graders", "1", "--json", "--modes", mode)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.driver.step", *small],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert found["attempts"] >= 64
    assert found["driver_s"] > 0.0
