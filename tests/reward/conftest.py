from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_helpers import CODE

from rollpacker.config import GradingConfig, RewardConfig
from rollpacker.reward.processes.pool import GradingPool


@pytest.fixture
def code(tmp_path) -> Path:
    path = tmp_path / "acts.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def pool_of(code) -> Iterator[Callable[..., GradingPool]]:
    """``pool_of("act", "length", retries=0)``: a pool of functions of the file above."""
    pools: list[GradingPool] = []

    def build(*names: str | RewardConfig, **settings) -> GradingPool:
        rewards = [
            RewardConfig(function=f"{code}:{n}", timeout_s=1.0) if isinstance(n, str) else n
            for n in names
        ]
        pool = GradingPool(rewards, GradingConfig(**settings))
        pools.append(pool)
        return pool

    yield build
    for pool in pools:
        pool.close()
