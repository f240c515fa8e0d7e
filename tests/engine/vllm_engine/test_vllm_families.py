"""Families whose layers vLLM holds in its own way sample with the weights they are given."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from engine_models import VOCABULARY, prompt, reference_logprobs, request
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_beside import Beside

from rollpacker.checkpoint_names import stored

pytestmark = pytest.mark.cluster

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
FAMILIES = {
    "qwen3_moe": EXPERTS,
    "glm4_moe": EXPERTS | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 8},
    "gemma4_text": {
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "smollm3": {},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 32,
        "time_step_min": 1e-6,  # transformers clamps steps there (1e-3), vLLM does not
    },
}


def made(kind, seed=0, **changes):
    """A model that moves with its seed, all of it but what a forward pass divides by."""
    config = AutoConfig.for_model(kind, **SIZES | FAMILIES.get(kind, {}) | changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in stored(model):
            if not name.endswith(("A_log", "dt_bias", ".D")):
                weight.add_(0.1 * torch.randn_like(weight))
    return model.eval()


@pytest.fixture(scope="module")
def beside():
    child = Beside()
    yield child
    child.close()


@pytest.fixture(scope="module")
def another():
    """Engines that fail leave process groups behind."""
    child = Beside()
    yield child
    child.close()


def asked():
    return [
        request(i, prompt(6 + 3 * (i % 4), i % 4), group=f"g{i % 4}", seed=i, ignore_stop=True)
        for i in range(8)
    ]


def difference(model, outputs):
    """The largest between what was sampled with and the model's own log-probabilities, in nats."""
    return max(
        float(np.abs(outputs[r.attempt].logprobs - wanted).max())
        for r in asked()
        for wanted in [reference_logprobs(model, r.prompt, outputs[r.attempt].tokens)]
    )


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_sampled_has_the_log_probabilities_of_the_newest_weights(kind, beside, tmp_path):
    first, second = made(kind, 1), made(kind, 2)
    beside.build(first, tmp_path)
    beside.load(first)
    outputs = beside.sample(asked())
    assert difference(first, outputs) < 1e-4
    assert difference(second, outputs) > 0.1  # weights that are not taken up are seen
    beside.load(second, 1)
    outputs = beside.sample(asked())
    assert difference(second, outputs) < 1e-4
    assert difference(first, outputs) > 0.1


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_5_text", "lfm2", "minimax_m2"])
def test_families_that_it_cannot_run_are_refused_in_a_line(kind, another, tmp_path):
    reasons = {
        "gpt_oss": "gpt_oss: vLLM 0.32 keeps the old values of its experts",
        "qwen3_5_text": "qwen3_5_text: vLLM's module for it needs torchvision",
        "lfm2": "beside transformers",
        "minimax_m2": "beside transformers",
    }
    if kind == "qwen3_5_text" and find_spec("torchvision"):
        pytest.skip("torchvision is there")
    more = {"lfm2": {"full_attn_idxs": [1]}}.get(kind, EXPERTS)
    with pytest.raises(ValueError, match=reasons[kind]) as caught:
        another.build(made(kind, **more), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_family_that_vllm_has_not_itself_is_not_run_beside_a_trainer(another, tmp_path):
    with pytest.raises(ValueError, match="smollm3 by transformers' own classes"):
        another.build(made("smollm3"), tmp_path, alone=False)


def test_a_budget_has_room_for_so_many_tokens_whatever_layers_keep(beside, tmp_path):
    """Of one sequence, and of several: windows and states are beside what grows."""
    for kind in ("gemma3_text", "nemotron_h"):
        info = beside.build(made(kind), tmp_path, kv_tokens=128, max_running=4)
        assert info.kv_tokens >= info.max_length >= 128
        beside.load(made(kind))
        tokens = prompt(88)
        outputs = beside.sample([request(0, tokens, max_tokens=40, ignore_stop=True)])
        assert len(outputs[0].tokens) == 40


def test_a_cpu_has_room_for_all_that_may_run(beside, tmp_path):
    for kind in ("qwen3_moe", "gemma4_text"):
        info = beside.build(made(kind), tmp_path, kv_tokens=0, max_running=3)
        assert info.max_length == 256
        assert 3 * 256 <= info.kv_tokens < 5 * 256


def _without(name):
    return lambda weights: {n: w for n, w in weights.items() if n != name}


BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


def test_weights_of_which_a_part_is_missing_or_unknown_are_an_error(beside, tmp_path):
    model = made("glm4_moe", 3)
    beside.build(model, tmp_path)
    beside.load(model)
    for name in (BIAS, EXPERT):
        with pytest.raises(ValueError, match=f"weights lack '{name}' \\(1 missing"):
            beside.load(model, 1, _without(name))
        with pytest.raises(RuntimeError, match="the engine has no weights"):
            beside.sample(asked())
    with pytest.raises(ValueError, match="weights hold 'other', which the model lacks"):
        beside.load(model, 1, lambda weights: {"other": torch.zeros(1)} | weights)
    beside.load(model, 2)
    assert difference(model, beside.sample(asked())) < 1e-4


def test_what_vllm_does_not_find_among_the_weights_is_an_error(beside, tmp_path):
    """It reads a key that transformers does not, and makes an expert more."""
    model = made("qwen3_moe", 3, shared_expert_intermediate_size=64)
    beside.build(model, tmp_path)
    with pytest.raises(ValueError, match=r"for vLLM's parameter 'model\.layers\.0\.mlp\.shared"):
        beside.load(model)
    with pytest.raises(RuntimeError, match="the engine has no weights"):
        beside.sample(asked())
