"""What the driver reads of a model of any family, and which checkpoints are of another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.train.model.loading import card_of
from rollpacker.train.state.checkpoint import check_architecture

TOKENIZER = SimpleNamespace(eos_token_id=7, model_max_length=10**30)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("qwen3_moe", SMALL | {"max_position_embeddings": 64}, (64, 4, 2)),
        ("gpt2", {"n_positions": 48, "n_head": 6}, (48, 6, 6)),
        ("gpt_neox", {"max_position_embeddings": 32}, (32, 64, 64)),
        ("bloom", {"seq_length": 96}, (96, 8, 8)),
        ("gemma3", {"text_config": {"num_attention_heads": 16}}, (131072, 16, 4)),
    ],
)
def test_names_of_families(kind: str, fields: dict[str, Any], said: tuple[int, int, int]) -> None:
    card = card_of(AutoConfig.for_model(kind, **fields), TOKENIZER, None, "it")
    assert (card.context, card.heads, card.kv_heads) == said
    assert card.kind == {"gemma3": "gemma3_text"}.get(kind, kind)
    assert 7 in card.stop_token_ids


def test_without_attention_there_are_no_heads_and_the_tokenizer_says_how_long() -> None:
    config = AutoConfig.for_model("mamba")
    bounded = SimpleNamespace(eos_token_id=7, model_max_length=512)
    card = card_of(config, bounded, None, "it")
    assert (card.context, card.heads, card.kv_heads) == (512, 0, 0)
    with pytest.raises(ValueError, match=r"model\.path=it: mamba models have no longest") as error:
        card_of(config, TOKENIZER, None, "it")
    assert "model_max_length in its tokenizer_config.json" in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def model_of(kind: str, **fields: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_experts": 16}, "experts=8, but the trainer has num_"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok=2, but the trainer has num_experts_per"),
        ({"moe_intermediate_size": 32}, "moe_intermediate_size=16, but the trainer has"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers=[], but the trainer has mlp_only_layers=[0]"),
    ],
)
def test_another_architecture_is_refused(
    tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    model = model_of("qwen3_moe", **SMALL)
    model.config.save_pretrained(tmp_path)
    check_architecture(tmp_path, model)
    with pytest.raises(ValueError, match="holds a model with") as error:
        check_architecture(tmp_path, model_of("qwen3_moe", **SMALL | changed))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_another_family_is_refused(tmp_path: Path) -> None:
    model_of("qwen3_moe", **SMALL).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type=qwen3_moe, .* but the trainer has model_"):
        check_architecture(tmp_path, model_of("gpt2", n_layer=2, n_embd=32, n_head=4))


@pytest.mark.parametrize(
    ("kind", "fields", "changed"),
    [
        ("gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 4}, {"n_layer": 3}),
        ("mamba2", {"num_hidden_layers": 2}, {"state_size": 64}),
        ("gemma3_text", {"num_hidden_layers": 2}, {"sliding_window": 128}),
        ("qwen3_next", {"num_hidden_layers": 4}, {"layer_types": ["full_attention"] * 4}),
        ("deepseek_v3", {"num_hidden_layers": 4}, {"kv_lora_rank": 256}),
    ],
)
def test_families_name_their_sizes_differently(
    tmp_path: Path, kind: str, fields: dict[str, Any], changed: dict[str, Any]
) -> None:
    model_of(kind, **fields).config.save_pretrained(tmp_path)
    check_architecture(tmp_path, model_of(kind, **fields))
    (key,) = changed
    with pytest.raises(ValueError, match=f" with .*{key}="):
        check_architecture(tmp_path, model_of(kind, **fields | changed))
