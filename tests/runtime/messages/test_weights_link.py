"""Real ranks in two network namespaces, joined by a throttled link whose bytes are counted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rollpacker.policy.gradients.transfer_plan import plan_transfers
from rollpacker.runtime.messages.weight_broadcast import receive_weights, send_weights

ROOT = Path(__file__).parents[3]


def measured(*, training: int, rollout: int, mib: float) -> dict[str, Any]:
    words = [sys.executable, "-m", "benchmarks.mux.sync", "--json", "--mib", str(mib)]
    words += ["--mbit", "100", "--training", str(training), "--rollout", str(rollout)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=150, cwd=ROOT)
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)["ways"]


@pytest.mark.wide
def test_four_receivers_cost_one_copy_instead_of_four() -> None:
    ways = measured(training=2, rollout=4, mib=2)
    assert 1.0 <= ways["planned"]["copies_over_slow_link"] < 1.1
    assert ways["flat"]["copies_over_slow_link"] >= 4.0


@pytest.mark.slow
@pytest.mark.parametrize(("training", "rollout"), [(1, 1), (3, 2), (1, 6), (4, 4)])
def test_one_copy_whatever_the_pools(training: int, rollout: int) -> None:
    ways = measured(training=training, rollout=rollout, mib=2)
    assert 1.0 <= ways["planned"]["copies_over_slow_link"] < 1.1


def test_models_of_another_size_are_refused() -> None:
    plan = plan_transfers(100, [0, 1], [2, 3])
    pools: Any = None  # nobody is asked
    with pytest.raises(ValueError, match="model must be 100 bytes"):
        send_weights(plan, 0, torch.zeros(50, dtype=torch.uint8), pools)
    with pytest.raises(ValueError, match="model must be 100 bytes"):
        receive_weights(plan, 2, torch.zeros(100), pools)
