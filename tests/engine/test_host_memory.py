"""Free memory, and the KV budgets that are taken from it."""

import pytest
from engine_models import build

from rollpacker.config import MiniEngineConfig
from rollpacker.engine import base
from rollpacker.runtime.cluster.machine_checks import free_memory_gb

GB = 1024**3


@pytest.fixture
def container(monkeypatch, tmp_path):
    """One that may have 3 GB and has 1 GB of it."""
    (tmp_path / "memory.max").write_text(f"{3 * GB}\n")
    (tmp_path / "memory.current").write_text(f"{GB}\n")
    monkeypatch.setattr(base, "GROUP", tmp_path)
    monkeypatch.setattr(base, "_machine_free_bytes", lambda: 100 * GB)
    return tmp_path


def test_the_least_of_machine_and_container(container):
    assert base.free_bytes() == 2 * GB
    assert free_memory_gb() == 2.0
    (container / "memory.current").write_text(f"{4 * GB}")
    assert base.free_bytes() == 0
    (container / "memory.max").write_text("max\n")
    assert base.free_bytes() == 100 * GB


def test_an_engine_sizes_its_cache_by_the_container(container):
    from rollpacker.engine.mini import MiniEngine

    free = 1 << 20
    (container / "memory.current").write_text(f"{3 * GB - free}")
    engine = MiniEngine(build("qwen2"), config=MiniEngineConfig(max_running=4096))
    per_block = engine._runner.kv_bytes()
    assert engine.info().kv_tokens == 16 * (free // 4 // per_block)
