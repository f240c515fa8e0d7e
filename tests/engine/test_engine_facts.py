"""Facts of an engine: its free memory, its abilities, the folder of its configuration."""

import json
from dataclasses import replace

import pytest
from engine_models import build

from rollpacker import hub
from rollpacker.config import MiniEngineConfig
from rollpacker.engine import base
from rollpacker.engine.base import EngineInfo, least
from rollpacker.hub import config_folder, folder_here
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


# What engines say of themselves.


def test_of_two_engines_the_least_holds_whoever_comes_first() -> None:
    one = EngineInfo(
        kv_tokens=64,
        max_length=40,
        tensor_parallel=(1,),
        latency={1: 1.0},
        prefill_token_s=0.0,
        exact_seeds=True,
    )
    other = replace(one, kv_tokens=32, max_length=50)
    assert least(one, other) == least(other, one) == replace(one, kv_tokens=32)


# Where an engine that loads a model's shape by itself finds it.


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A model that was loaded from the hub before, and no connection now."""
    folder = tmp_path / "models--some--model"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for module in ("constants", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(hub, "answers", lambda *_: False)
    return snapshot


def test_a_folder_below_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert config_folder("~/m") == str(tmp_path / "m")


def test_a_model_in_the_cache_without_a_connection(cached):
    assert config_folder("some/model") == str(cached)
    assert (folder_here("some/model"), folder_here("some/other")) == (cached, None)
    assert (folder_here(str(cached)), folder_here("")) == (cached, None)
    with pytest.raises(ValueError, match="cannot be reached"):
        config_folder("some/other")
