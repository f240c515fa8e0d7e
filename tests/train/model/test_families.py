"""Every family computes in micro-batches what transformers computes of each sequence alone."""

from __future__ import annotations

import families
import numpy as np
import pytest
import torch
from conftest import naive_logprobs
from torch import nn

from rollpacker.core.types import AttemptId, PromptId, Sample
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.layouts import fit_of
from rollpacker.train.model.packing import Costs, Item

CPU = torch.device("cpu")
CLOSE = 1e-5
"""Nats, and relative to the largest gradient."""
WRAPPED = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "granitemoehybrid", "falcon_h1"),
    *("nemotron_h", "bamba", "jamba"),
)
ROWS = ("llama4_text", "bloom", "falcon")


def _items():
    """Two groups; sequences are longer than the windows, one has a single token."""
    rng = np.random.default_rng(0)
    items = []
    for group, (before, lengths) in enumerate([(5, (17, 1, 9)), (13, (4, 22))]):
        prompt = rng.integers(2, families.VOCABULARY, before).astype(np.int32)
        for index, length in enumerate(lengths):
            tokens = rng.integers(2, families.VOCABULARY, length).astype(np.int32)
            sample = Sample(
                prompt=PromptId(str(group)),
                index=index,
                attempt=AttemptId(len(items)),
                prompt_tokens=prompt,
                tokens=tokens,
                logprobs=np.zeros(length, np.float32),
                finish_reason="stop",
                weights_version=0,
            )
            items.append(Item(sample, 1.0, group))
    return items


def _gradients(model, value):
    model.zero_grad(set_to_none=True)
    value.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _off(found, wanted):
    most = max(float(g.abs().max()) for g in wanted.values())
    zero = torch.zeros(())
    names = found.keys() | wanted.keys()
    differences = [(found.get(n, zero) - wanted.get(n, zero)).abs().max() for n in names]
    return float(max(differences)) / most


@pytest.mark.parametrize("name", families.CONFIGURATIONS)
def test_micro_batches_are_the_sequences_alone(name):
    model, items = families.make(name), _items()
    fit = fit_of(model)
    layout = "rows" if name in ROWS else "wrapped" if name in WRAPPED else "flat"
    assert (fit.layout, fit.shares_prompts) == (layout, layout == "flat")
    alone = torch.cat(
        [naive_logprobs(model, i.sample.prompt_tokens, i.sample.tokens, 0.7) for i in items]
    )
    weights = torch.linspace(-1.0, 1.0, len(alone))
    wanted = _gradients(model, alone @ weights)
    for shared in (False, True)[: 1 + fit.shares_prompts]:
        batch = packing.build(items, shared, CPU)
        for recompute in (False, True):
            forward = PackedForward(model, fit.layout, recompute=recompute)
            found, _ = forward.logprobs(batch, 0.7)
            assert (found - alone).abs().max() < CLOSE
            assert _off(_gradients(model, found @ weights), wanted) < CLOSE
            forward.release()
    again = naive_logprobs(model, items[0].sample.prompt_tokens, items[0].sample.tokens, 0.7)
    assert torch.equal(again, alone[: len(again)]), "the model is not as it was"


def test_windows_are_seen():
    """With other windows the same weights give something else: the comparison is of windows."""
    model, item = families.make("mistral"), _items()[0]
    batch = packing.build([item], False, CPU)
    with torch.no_grad():
        near, _ = PackedForward(model).logprobs(batch, 1.0)
        model.config.sliding_window = 100
        far, _ = PackedForward(model).logprobs(batch, 1.0)
    assert (near - far).abs().max() > 1e-2


def test_layers_are_recomputed():
    """Fewer activations are kept, and layers run twice."""
    model, items = families.make("qwen3_next"), _items()
    batch = packing.build(items, False, CPU)
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


def test_interleaved_batches_recompute_their_own():
    model, items = families.make("qwen3_5_text"), _items()
    forward = PackedForward(model, "wrapped", recompute=True)
    parts = [packing.build(part, False, CPU) for part in (items[:2], items[2:])]
    apart = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for part in parts:
        for n, g in _gradients(model, forward.logprobs(part, 1.0)[0].sum()).items():
            apart[n] += g
    both = [forward.logprobs(part, 1.0)[0].sum() for part in parts]
    assert _off(_gradients(model, both[0] + both[1]), apart) < CLOSE


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


def test_experts_count_by_what_a_token_takes():
    dense, moe = families.make("qwen3"), families.make("qwen3_moe")
    config = moe.config
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    router = config.hidden_size * config.num_experts
    for model, mlp in ((dense, 3 * 32 * 64), (moe, 2 * expert + router)):
        attention = 32 * 16 * (4 + 2 + 2 + 4)
        norms = 2 * (2 * 32 + 2 * 16) + 32
        expected = Costs(linear=2 * (attention + mlp) + norms, attention=2 * 2 * 4 * 16 * 2)
        assert packing.costs_of(model) == expected
