"""A tiny configuration of every family of causal language models that is compared.

Windows, chunks and convolutions are shorter than the sequences of the tests, experts are more than
a token takes, and layers alternate where a family's do.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.checkpoint_names import stored

VOCABULARY = 41

_PLAIN = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_HEADS = {"head_dim": 32}
_WINDOW = {"sliding_window": 8}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
}
_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_MAMBA = {"mamba_d_conv": 3, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen2, windows": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3": _HEADS,
    "gemma": _HEADS,
    "gemma2": _HEADS | _WINDOW | {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": _HEADS | _WINDOW | _BOTH,
    "gemma4_text": _HEADS
    | _WINDOW
    | _BOTH
    | {
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
    },
    "phi": {},
    "phi3": _WINDOW,
    "stablelm": {},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "starcoder2": {"use_bias": True},
    "mistral": _WINDOW,
    "ministral": _WINDOW | _BOTH | _HEADS,
    "cohere": {"logit_scale": 0.5},
    "cohere2": _WINDOW | _BOTH | {"logit_scale": 0.5},
    "exaone4": _WINDOW | _BOTH,
    "olmo2": {},
    "olmo3": _WINDOW | _BOTH,
    "smollm3": {"no_rope_layers": [1, 0]},
    "seed_oss": _HEADS,
    "ernie4_5": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "glm": _HEADS,
    "glm4": _HEADS,
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "nemotron": {},
    "opt": {"ffn_dim": 160, "word_embed_proj_dim": 128},
    "qwen2_moe": _EXPERTS
    | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_moe": _EXPERTS | _HEADS | {"norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": _EXPERTS
    | _HEADS
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2} | _HEADS,
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "gpt_oss": _HEADS
    | _WINDOW
    | _BOTH
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3_next": _EXPERTS
    | _LINEAR
    | {"shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _EXPERTS | _LINEAR | {"shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "granitemoehybrid": _MAMBA
    | {
        "layer_types": ["mamba", "attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "logits_scaling": 3.0,
    },
    "falcon_h1": _MAMBA
    | {
        "head_dim": 32,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_ssm": 256,
        "lm_head_multiplier": 0.5,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 3,
    },
    "nemotron_h, experts": _EXPERTS
    | {
        "hybrid_override_pattern": "M*ME",
        "num_hidden_layers": 4,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 8,
        "n_groups": 1,
        "conv_kernel": 3,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    "bamba": _MAMBA | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 32},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_d_conv": 3,
        "use_mamba_kernels": False,
    },
    "llama4_text": _HEADS
    | {
        "intermediate_size_mlp": 160,
        "num_local_experts": 4,
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
    },
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": False},
}
"""By a name whose first word is transformers' ``model_type``."""


COMPOSED: dict[str, Any] = {
    "text_config": _PLAIN
    | CONFIGURATIONS["gemma3_text"]
    | {"model_type": "gemma3_text", "vocab_size": 96},
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "image_token_index": 95,
}
"""Text and vision, of gemma3."""


def make(name: str, seed: int = 0, **more: Any) -> Any:
    """A random model of a family in float32, far from its initial symmetry, buffers too; ``more``
    is of its configuration."""
    settings = _PLAIN | CONFIGURATIONS.get(name, {}) | more
    config = AutoConfig.for_model(name.split(",")[0], **settings)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for _, weight in stored(model):
            weight.add_(0.05 * torch.randn_like(weight))
    return model.eval()
