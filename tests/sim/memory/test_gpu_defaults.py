"""What a job without keys for engine, type and memory gets on GPUs that people have."""

from typing import Any

import pytest

from rollpacker.config import parse
from rollpacker.job.ask.doctor import MemoryFit, look

SIZES = {"0.5B": "Qwen2.5-0.5B", "1.5B": "Qwen2.5-1.5B", "3B": "Qwen2.5-3B", "8B": "Llama-3.1-8B"}


def fit(size: str, device: str, gpus: int = 1, **keys: Any) -> MemoryFit:
    tree: dict[str, Any] = {
        "output": "runs/x",
        "steps": 1,
        "model": {"path": SIZES[size]} | ({"lora_rank": 16} if size == "8B" else {}),
        "data": {"path": "rows.jsonl"},
        "rewards": [{"function": "math"}],
        "rollout": {"max_completion_length": 4096},
        "train": {"learning_rate": 1e-6},
    }
    for section, values in keys.items():
        tree[section] = tree.get(section, {}) | values
    return look(parse(tree, "job"), device, gpus)


@pytest.mark.parametrize(
    ("model", "device"),
    [
        ("0.5B", "L4"),
        ("0.5B", "RTX 4090"),
        ("1.5B", "L40S"),
        ("1.5B", "H100"),
        ("3B", "H100"),
        ("8B", "L4"),
        ("8B", "L40S"),
        ("8B", "A100 80GB PCIe"),
    ],
)
def test_what_people_have_runs_what_they_train(model: str, device: str) -> None:
    found = fit(model, device)
    assert found.fits
    assert found.config.engine.kind == "vllm"
    assert found.config.model.dtype == "bfloat16"
    assert found.config.train.micro_batch_tokens >= 4096


@pytest.mark.parametrize(("model", "device"), [("1.5B", "L4"), ("3B", "L40S")])
def test_what_does_not_fit_is_told_with_what_would(model: str, device: str) -> None:
    found = fit(model, device)
    assert not found.fits
    assert found.changes is not None


def test_keys_that_are_set_stay() -> None:
    keys: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "engine": {"kind": "vllm", "gpu_memory": 0.2, "max_running": 64},
        "train": {"micro_batch_tokens": 3000, "gradient_checkpointing": True},
        "devices": {"turns": "off"},
    }
    found = fit("0.5B", "H100", **keys)
    assert not found.defaults
    assert found.config.engine.kind == "vllm"
    assert (found.config.engine.gpu_memory, found.config.engine.max_running) == (0.2, 64)


def test_an_engine_that_is_set_is_not_replaced() -> None:
    found = fit("0.5B", "H100", engine={"kind": "mini"})
    assert found.config.engine.kind == "mini"
    assert found.defaults["train.micro_batch_tokens"] == 16384
    assert not any(key.startswith("engine") for key in found.defaults)


def test_a_gpu_without_bfloat16_keeps_float32() -> None:
    assert fit("0.5B", "T4").config.model.dtype == "float32"


def test_a_trainer_leaves_only_where_nothing_else_fits() -> None:
    assert fit("8B", "L4").config.devices.turns == "both"
    assert fit("8B", "H100").config.devices.turns == "auto"


def test_a_phase_alone_counts_where_engine_and_trainer_take_turns() -> None:
    keys: dict[str, Any] = {"engine": {"kind": "vllm", "gpu_memory": 0.4}}
    turns, beside = (
        fit("1.5B", "L40S", devices={"turns": each}, **keys).needs.total for each in ("auto", "off")
    )
    assert turns < beside - 0.3 * 48e9


def test_eight_gpus_that_decode_apart_keep_their_engines_awake() -> None:
    found = fit("3B", "H100", 8, devices={"layout": "separate", "training": 4})
    assert found.fits
    assert found.config.devices.turns == "auto"
    assert "engine, asleep" not in {part.name for part in (*found.needs.worker,)}
