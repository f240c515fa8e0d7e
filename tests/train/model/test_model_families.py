"""Every family computes in micro-batches what transformers computes of each sequence alone."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import torch
from family_cases import (
    CLOSE,
    CPU,
    adapters,
    export,
    forward,
    gradients,
    items,
    off,
    over_processes,
)
from torch import nn

from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.layouts import check_head, fit_of
from rollpacker.train.model.packing import Costs
from rollpacker.train.model.token_logprobs import Head

RESULTS = json.loads((Path(__file__).parents[1] / "support" / "family_results.json").read_text())


QUICK = (
    *("qwen2", "gpt_neox", "mistral", "gemma2", "gemma3_text", "gpt_oss", "qwen3_moe"),
    *("deepseek_v3", "llama4_text", "nemotron_h", "qwen3_next"),
)
"""Of each way to attend, mix and be laid out one or two."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.wide)
        for name in families.CONFIGURATIONS
    ],
)
def test_micro_batches_are_the_sequences_alone(name):
    found, noted = forward(name), RESULTS["families"][name]
    assert found.pop("layout") == noted["layout"]
    ways = ["padded", "shared"][: 1 + (noted["layout"] == "flat")]
    assert set(found) == {way + more for way in ways for more in ("", ", recomputed")}
    assert all(max(worst) < CLOSE for worst in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("name", families.CONFIGURATIONS)
def test_checkpoints_are_the_model_and_merged_adapters_what_was_trained(name):
    assert export(name) == 0.0
    assert adapters(name) < CLOSE


@pytest.mark.slow
def test_two_processes_that_share_weights_are_one(tmp_path):
    found = over_processes(list(families.CONFIGURATIONS), tmp_path)
    assert {k: v for k, v in found.items() if isinstance(v, str) or not v < CLOSE} == {}


def test_windows_are_seen():
    """With other windows the same weights give something else: the comparison is of windows."""
    model, item = families.make("mistral"), items()[0]
    batch = packing.build([item], False, CPU)
    with torch.no_grad():
        near, _ = PackedForward(model).logprobs(batch, 1.0)
        model.config.sliding_window = 100
        far, _ = PackedForward(model).logprobs(batch, 1.0)
    assert (near - far).abs().max() > 1e-2


def test_layers_are_recomputed():
    """Fewer activations are kept, and layers run twice."""
    model = families.make("qwen3_next")
    batch = packing.build(items(), False, CPU)
    kept, runs = [], []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    for recompute in (False, True):
        sizes = []
        forward = PackedForward(model, "wrapped", recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            value = forward.logprobs(batch, 1.0)[0].sum()
        value.backward()
        kept.append(sum(sizes))
        forward.release()
    assert kept[1] < kept[0] / 3
    assert len(runs) == 3


def test_a_model_is_as_it_was_when_it_is_released():
    """Dropout of layers that have it of their own, and the mode of each module."""
    model = families.make("opt", dropout=0.1)
    layers = model.model.decoder.layers
    forward = PackedForward(model, recompute=True)
    assert [layer.dropout for layer in layers] == [0.0, 0.0]
    model.train()
    layers[0].self_attn.eval()
    before = [module.training for module in model.modules()]
    forward.logprobs(packing.build(items(), False, CPU), 1.0)
    assert not any(module.training for module in model.modules())
    forward.release()
    assert [layer.dropout for layer in layers] == [0.1, 0.1]
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize("kind", ["gpt_neox_japanese", "openai-gpt"])
def test_what_cannot_be_recomputed_is_refused(kind):
    model = families.make(kind, intermediate_multiple_size=1)
    with pytest.raises(ValueError, match=r"gradient_checkpointing: transformers cannot"):
        PackedForward(model, "rows", recompute=True)


def test_a_model_that_recomputes_for_its_owner_still_does():
    model = families.make("qwen3")
    model.gradient_checkpointing_enable()
    before = [layer._gradient_checkpointing_func for layer in model.model.layers]
    forward = PackedForward(model, recompute=True)
    forward.logprobs(packing.build(items(), False, CPU), 1.0)[0].sum().backward()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == before
    assert model.is_gradient_checkpointing
    assert not any(module.training for module in model.modules())


def test_interleaved_batches_recompute_their_own():
    model, all_items = families.make("qwen3_5_text"), items()
    forward = PackedForward(model, "wrapped", recompute=True)
    parts = [packing.build(part, False, CPU) for part in (all_items[:2], all_items[2:])]
    apart = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for part in parts:
        for n, g in gradients(model, forward.logprobs(part, 1.0)[0].sum()).items():
            apart[n] += g
    both = [forward.logprobs(part, 1.0)[0].sum() for part in parts]
    assert off(gradients(model, both[0] + both[1]), apart) < CLOSE


class _Leaky(nn.Module):
    """Mixes each token with the one before, wherever a sequence begins."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x + torch.roll(x, 1, dims=1))


def test_a_model_that_mixes_sequences_unseen_is_run_by_rows_or_refused():
    model = families.make("qwen3")
    for layer in model.model.layers:
        layer.mlp = _Leaky(layer.mlp)  # not causal: the first token sees the last one
    with pytest.raises(ValueError, match=r"qwen3 models cannot be trained here: flat: .*; rows: "):
        fit_of(model)


def test_a_head_of_another_making_is_refused():
    model = families.make("qwen3")
    model.lm_head.register_forward_hook(lambda _, __, logits: logits * 1.5)
    with pytest.raises(ValueError, match=r"cannot be trained here: .*off by"):
        fit_of(model)


GRIFFIN = {"lru_width": 128, "head_dim": 32, "attention_window_size": 8, "num_hidden_layers": 3}
HEADS = {
    "a factor": lambda logits: logits * 1.05,
    "a bound": lambda logits: 60.0 * torch.tanh(logits / 60.0),
    "a bias": lambda logits: logits + torch.linspace(-0.2, 0.2, logits.shape[-1]).to(logits.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_are_compared_to_the_rounding_of_their_type(dtype):
    """In bfloat16 too a factor that is off by a twentieth is seen, and a bound that no logit of
    random weights comes near."""
    for name in ("gemma2", "cohere", "granite", "falcon_h1", "opt"):
        check_head(families.make(name).to(dtype))
    griffin = families.make("recurrent_gemma", **GRIFFIN).to(dtype)
    check_head(griffin)
    assert Head.of(griffin).cap == griffin.config.logits_soft_cap == 30.0
    model = families.make("qwen3").to(dtype)
    for more in HEADS.values():
        hook = model.lm_head.register_forward_hook(lambda _, __, logits, more=more: more(logits))
        with pytest.raises(ValueError, match=r"qwen3 models cannot be trained here: its logits .*"):
            check_head(model)
        hook.remove()
    check_head(model)


def test_experts_count_by_what_a_token_takes():
    dense, moe = families.make("qwen3"), families.make("qwen3_moe")
    hidden, inner, heads, kv_heads, width = 128, 160, 4, 2, 32
    expert = 3 * hidden * moe.config.moe_intermediate_size
    router = hidden * moe.config.num_experts
    # Some families have another name for how many a token takes.
    other = families.make("qwen3_moe")
    other.config.num_experts_per_tok = 0
    other.config.moe_topk = 2
    feeds = 2 * expert + router
    for model, mlp in ((dense, 3 * hidden * inner), (moe, feeds), (other, feeds)):
        attention = 2 * hidden * width * (heads + kv_heads)
        norms = 2 * (2 * hidden + 2 * width) + hidden
        expected = Costs(linear=2 * (attention + mlp) + norms, attention=2 * 2 * heads * width * 2)
        assert packing.costs_of(model) == expected


def test_queries_that_are_scaled_by_their_index_are_run_by_rows():
    """Whose steps are far too long for a comparison to see them, as in Llama 4 itself."""
    model = families.make("llama4_text")
    for layer in model.model.layers:
        layer.self_attn.floor_scale = 8192
    assert fit_of(model).layout == "rows"
    model.config.attn_temperature_tuning = False
    assert fit_of(model).layout == "flat"
