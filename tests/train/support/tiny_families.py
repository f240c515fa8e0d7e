"""Tiny configurations of families whose checkpoints hold their weights in different ways."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.checkpoint_names import stored

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
_GATED_DELTA = {
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_MAMBA = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
}

DENSE = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "gpt2": {},
    "gpt_neox": {},
    "phi3": {},
    "glm4": {"head_dim": 8},
    "smollm3": {},
    "olmo3": {},
    "gemma3_text": {"head_dim": 8, "num_hidden_layers": 6},
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 16,
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    },
    "lfm2": {"num_hidden_layers": 3, "full_attn_idxs": [1]},
}
FUSED = {
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS | {"head_dim": 8},
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "minimax_m2": _EXPERTS | {"head_dim": 8, "rotary_dim": 8},
    "glm4_moe": _EXPERTS | {"head_dim": 8, "first_k_dense_replace": 1},
    "deepseek_v3": _EXPERTS | _MLA | {"first_k_dense_replace": 1},
    "qwen3_next": _EXPERTS | _GATED_DELTA | {"head_dim": 8},
    "nemotron_h": _EXPERTS
    | _MAMBA
    | {
        "head_dim": 8,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*ME",
        "moe_shared_expert_intermediate_size": 16,
    },
}
OTHER = {
    "gpt_oss": _EXPERTS | {"head_dim": 8},
    "granitemoe": _EXPERTS,
    "llama4_text": _EXPERTS | {"head_dim": 8, "intermediate_size_mlp": 48},
}
"""Experts that checkpoints hold as they are in memory."""

FAMILIES = DENSE | FUSED | OTHER


def tiny(kind: str, seed: int = 0):
    """A model in which no two weights are the same, buffers that persist among them."""
    config = AutoConfig.for_model(kind, **_SIZES | FAMILIES[kind])
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for _, weight in stored(model):
            weight.copy_(0.3 * torch.randn(weight.shape))
    return model.eval()
