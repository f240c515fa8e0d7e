"""Flat micro-batches give the logits of transformers' own forward."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tiny_models import FAMILIES, group_batch, make_model, naive_logprobs

from rollpacker.config import GRPOConfig
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.packing import Costs, Item
from rollpacker.train.model.token_logprobs import Head, token_logprobs

CPU = torch.device("cpu")
COSTS = Costs(linear=1000.0, attention=100.0)


def _items(groups):
    return [
        Item(s, float(a), n)
        for n, g in enumerate(groups)
        for s, a in zip(g.samples, g.advantages, strict=True)
    ]


@cache
def _case(family):
    """A model, items, and the log-probabilities of each by transformers, by its id."""
    model = make_model(family)
    items = _items(group_batch(model, GRPOConfig()))
    with torch.no_grad():
        found = [naive_logprobs(model, i.sample.prompt_tokens, i.sample.tokens, 0.7) for i in items]
    return model, items, {id(i): each for i, each in zip(items, found, strict=True)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["padded", "prompt_shared", "auto"])
@pytest.mark.parametrize("budget", [1, 60, 10_000])
def test_logprobs_and_entropy_are_those_of_transformers(family, mode, budget):
    model, items, naive = _case(family)
    batches, shared = packing.plan(items, budget, mode, COSTS)
    assert sorted(id(i) for b in batches for i in b) == sorted(map(id, items))
    for plan in batches:
        batch = packing.build(plan, shared, CPU)
        with torch.no_grad():
            forward = PackedForward(model)
            found, entropy = forward.logprobs(batch, 0.7)
            expected = torch.cat([naive[id(i)] for i in plan])
            torch.testing.assert_close(found, expected, atol=4e-5, rtol=1e-5)
            p = torch.softmax(model.lm_head(forward.hidden_states(batch)) / 0.7, -1)
            torch.testing.assert_close(entropy, -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-4)


def test_micro_batches_keep_to_the_budget():
    model = make_model()
    items = _items(group_batch(model, GRPOConfig(), count=8, size=6))
    longest = max(i.prompt_length + i.inputs for i in items)
    for budget in (longest, 100, 300):
        for plan in packing.plan(items, budget, "padded", COSTS)[0]:
            rows = [i.prompt_length + i.inputs for i in plan]
            assert len(rows) * max(rows) <= max(budget, longest)
        for plan in packing.plan(items, budget, "prompt_shared", COSTS)[0]:
            assert len(packing.build(plan, True, CPU).tokens) <= max(budget, longest)


def test_sharing_runs_a_prompt_once_and_auto_takes_it_for_long_prompts():
    model = make_model()
    groups = group_batch(model, GRPOConfig(), count=3, size=8)
    items = _items(groups)
    batches, _ = packing.plan(items, 10_000, "prompt_shared", COSTS)
    (batch,) = [packing.build(b, True, CPU) for b in batches]
    prompts = sum(len(g.samples[0].prompt_tokens) for g in groups)
    responses = sum(len(s.tokens) - 1 for g in groups for s in g.samples)
    assert len(batch.tokens) == prompts + responses
    long_prompts = Costs(linear=1.0, attention=0.0)
    assert packing.plan(items, 10_000, "auto", long_prompts)[1]
    long_attention = Costs(linear=1.0, attention=1000.0)
    many = _items(group_batch(model, GRPOConfig(), count=8, size=8))
    assert not packing.plan(many, 200, "auto", long_attention)[1]


@pytest.mark.parametrize("chunk", [VOCAB := 23, 5 * 23, 1 << 20])
@pytest.mark.parametrize(
    ("bias", "scale", "cap"), [(False, 1.0, 0.0), (True, 0.6, 0.0), (False, 1.0, 2.0), (True, 3, 2)]
)
def test_chunked_logprobs_have_the_gradient_of_log_softmax(chunk, bias, scale, cap):
    torch.manual_seed(0)
    hidden = torch.randn(17, 8, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(VOCAB, 8, requires_grad=True)
    inputs = [hidden, weight]
    inputs += [torch.randn(VOCAB, requires_grad=True)] if bias else []
    targets = torch.randint(0, VOCAB, (17,))
    weights = torch.randn(17)
    logits = scale * (hidden @ weight.T + (inputs[2] if bias else 0.0))
    logits = cap * torch.tanh(logits / cap) if cap else logits
    expected = torch.log_softmax(logits / 0.5, -1).gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad(expected @ weights, inputs)
    head = Head(weight, inputs[2] if bias else None, scale, cap)
    found, _ = token_logprobs(hidden, head, targets, 0.5, chunk)
    got = torch.autograd.grad(found @ weights, inputs)
    torch.testing.assert_close(found, expected)
    for g, w in zip(got, wanted, strict=True):
        torch.testing.assert_close(g, w, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", [8, 40, 1 << 23])
def test_logits_of_bfloat16_are_not_rounded_to_it(part, monkeypatch):
    monkeypatch.setattr("rollpacker.train.model.token_logprobs._PART_ELEMENTS", part)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 8).bfloat16() for n in (9, 101))
    targets = torch.arange(9)
    exact = (hidden.double() @ weight.double().T / 0.7).log_softmax(-1)
    found, entropy = token_logprobs(hidden, Head(weight), targets, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact[targets, targets], rtol=0, atol=5e-6)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=5e-6)
