"""Real ranks in two network namespaces, joined by a throttled link whose bytes are counted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def measured(*, rollout: int, mib: float) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.mux.sync", "--json", "--mib", str(mib)]
    words += ["--mbit", "100", "--rollout", str(rollout)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=150, cwd=ROOT)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["ways"]


@pytest.mark.wide
def test_four_receivers_cost_one_copy_instead_of_four() -> None:
    ways = measured(rollout=4, mib=2)
    assert 1.0 <= ways["planned"]["copies_over_slow_link"] < 1.1
    assert ways["flat"]["copies_over_slow_link"] >= 4.0


@pytest.mark.slow
@pytest.mark.parametrize("rollout", [1, 6])
def test_one_copy_whatever_the_pool(rollout: int) -> None:
    ways = measured(rollout=rollout, mib=2)
    assert 1.0 <= ways["planned"]["copies_over_slow_link"] < 1.1
