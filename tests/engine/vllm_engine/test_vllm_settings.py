"""What vLLM is told to be on a GPU by what it is asked for, and how it is put to rest."""

from types import SimpleNamespace

import pytest
from engine_models import build, drain, prompt, request

from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.engine.base import ALONE, Span

pytestmark = pytest.mark.cluster


@pytest.fixture
def settings(folder):
    from rollpacker.engine.vllm.build import _settings

    def told(sharers=1, span=ALONE, **config):
        model = ModelConfig(path=str(folder))
        return _settings(model, VllmEngineConfig(**config), "cuda:0", sharers, span)

    return told


def test_a_given_budget_on_a_gpu_is_not_measured(settings):
    from rollpacker.engine.vllm.build import Budget

    told = settings(kv_tokens=1024)
    assert told["kv_cache_memory_bytes"]
    assert told["distributed_executor_backend"].budget == Budget(tokens=1024, running=256)
    assert told["gpu_memory_utilization"] < 0.01
    told = settings(kv_tokens=1024, span=Span(size=2, meeting="/there"))
    assert told["distributed_executor_backend"].budget.tokens == 2048


def test_else_it_has_its_share(settings):
    told = settings(sharers=2, gpu_memory=0.5)
    assert told["gpu_memory_utilization"] == 0.25
    assert told["max_model_len"] == -1
    assert told["max_num_batched_tokens"] == 8192
    assert "block_size" not in told  # else vLLM would not choose by its attention
    assert "kv_cache_memory_bytes" not in told
    assert told["distributed_executor_backend"].budget is None


def test_an_engine_that_rests_on_a_gpu_gives_back_all(settings, folder):
    from rollpacker.engine.vllm import VllmEngine

    assert settings()["enable_sleep_mode"]
    engine = VllmEngine(ModelConfig(path=str(folder)), config=VllmEngineConfig(kv_tokens=256))
    engine.load_weights(build("wide").named_parameters(), 0)
    built, calls = engine._engine, []
    engine._engine = SimpleNamespace(
        model_config=SimpleNamespace(enable_sleep_mode=True),
        reset_prefix_cache=built.reset_prefix_cache,
        sleep=lambda level: calls.append(level),
        wake_up=lambda: calls.append("awake"),
    )
    engine.sleep()
    engine.wake()
    assert calls == [2, "awake"]
    engine._engine = built


def test_one_that_rested_asks_for_weights(folder, monkeypatch):
    from rollpacker.engine.vllm import VllmEngine

    monkeypatch.setenv("HOME", str(folder.parent))
    engine = VllmEngine(
        ModelConfig(path=f"~/{folder.name}"), config=VllmEngineConfig(kv_tokens=256)
    )
    engine.load_weights(build("wide").named_parameters(), 0)
    engine.sleep()
    engine.wake()
    with pytest.raises(RuntimeError, match="the engine has no weights since it slept"):
        engine.submit([request(0, prompt(5))])
    with pytest.raises(RuntimeError, match="the engine has no weights since it slept"):
        engine.load_weights(None, 1)
    engine.load_weights(build("wide").named_parameters(), 1)
    engine.submit([request(0, prompt(5), ignore_stop=True)])
    assert len(drain(engine)[0].tokens) == 20
