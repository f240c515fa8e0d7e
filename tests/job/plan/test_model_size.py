"""A model's weights, counted as transformers builds it."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from rollpacker.job.plan.defaults import count_weights, shape_of_config
from rollpacker.sim.costs.layers_of_config import FAMILIES
from rollpacker.sim.costs.models import ModelShape, WeightCount


def config_of(kind: str, **fields: Any) -> Any:
    return AutoConfig.for_model(kind, **fields)


TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "intermediate_size": 64,
}


def test_experts_by_hand() -> None:
    """Two layers of eight experts of three matrices of 32 x 16, of which a token meets two."""
    more = {"moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
    count = count_weights(config_of("qwen3_moe", **TINY, **more), "it")
    experts = 2 * 8 * 3 * 32 * 16
    attention = 32 * 32 + 2 * 16 * 32 + 32 * 32 + 2 * 8
    shared = 2 * (attention + 8 * 32 + 2 * 32) + 2 * 100 * 32 + 32
    assert count == WeightCount(shared + experts, shared + experts // 4, experts)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("mixtral", 8),
        ("qwen2_moe", 60),
        ("qwen3_moe", 128),
        ("qwen3_next", 512),
        ("olmoe", 64),
        ("gpt_oss", 128),
        ("deepseek_v3", 256),
        ("glm4_moe", 128),
        ("minimax_m2", 256),
        ("granitemoe", 8),
        ("ernie4_5_moe", 64),
        ("llama4_text", 16),
        ("jamba", 16),
        ("granitemoehybrid", 8),
        ("nemotron_h", 8),
    ],
)
def test_the_count_and_the_formula_agree_on_experts(kind: str, experts: int) -> None:
    config = config_of(kind)
    count = count_weights(config, "it")
    formula = ModelShape.from_config(config.to_dict(), "it")
    assert max(layer.experts for layer in formula.blocks) == experts
    assert count.experts == formula.count.experts
    assert count.active == pytest.approx(formula.active, rel=0.015)


def test_a_composed_model_is_its_text_model() -> None:
    whole = config_of("gemma3", text_config={**TINY, "sliding_window": 16})
    shape = shape_of_config(whole, "it")
    assert (shape.kind, shape.layers, shape.tied) == ("gemma3_text", 2, True)
    assert shape.count == count_weights(whole.text_config, "it")
    assert shape.cached(1, 64) == (0, 2 * 16 * 2 * 8 * 2)


@pytest.mark.parametrize("kind", ["gemma4_text", "phi", "stablelm", "apertus", "zamba2", "afmoe"])
def test_families_without_a_formula_have_sizes_too(kind: str) -> None:
    config = config_of(kind)
    shape = shape_of_config(config, "it")
    assert kind not in FAMILIES
    assert shape.parameters == count_weights(config, "it").total > 1e8
    assert shape.cached(1, 4096).token > 0


def test_a_model_that_cannot_be_built_is_one_line() -> None:
    config = config_of("qwen3_moe", **TINY | {"num_key_value_heads": 2, "hidden_act": "none"})
    with pytest.raises(ValueError, match=r"model\.path=it: transformers cannot build") as e:
        count_weights(config, "it")
    assert len(str(e.value).splitlines()) == 1
