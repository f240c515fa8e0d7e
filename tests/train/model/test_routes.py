"""Tokens go to the experts that they are told to, and routers keep their gradient."""

from __future__ import annotations

from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from family_cases import CPU, TEMPERATURE, gradients, groups, items, off, record
from gang import gradient, make_trainer
from tiny_models import clone

from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.layouts import fit_of
from rollpacker.train.model.routes import mixtures_of

MIXTURES = {
    name: "wrapped" if name in ("qwen3_next", "qwen3_5_moe_text", "jamba") else "flat"
    for name in families.CONFIGURATIONS
    if name
    in (
        *("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "ernie4_5_moe", "minimax_m2"),
        *("deepseek_v2", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe_text", "jamba"),
    )
} | {"gemma4_text": "flat"}
QUICK = ("qwen3_moe", "minimax_m2", "deepseek_v3", "gpt_oss", "qwen3_next", "gemma4_text")
"""Of each way to choose experts and be laid out one or two."""
GEMMA4 = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
"""Its experts are beside a dense MLP, in the decoder layer itself."""


def _make(name, seed=0):
    return families.make(name, seed, **(GEMMA4 if name == "gemma4_text" else {}))


def _run(model, batch, **options):
    """Log-probabilities, and the experts of each mixture."""
    chosen = []
    forward = PackedForward(model, **options)
    handles = record(model, chosen)
    found, _ = forward.logprobs(batch, TEMPERATURE)
    for handle in handles:
        handle.remove()
    forward.release()
    return found, torch.stack(chosen, dim=1)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if name in QUICK else pytest.mark.wide)
        for name, layout in MIXTURES.items()
    ],
)
def test_routes_of_another_model_are_taken(name, layout):
    model, other = _make(name), _make(name, seed=1)
    batch = packing.build(items(), False, CPU)
    with torch.no_grad():
        free, own = _run(model, batch, layout=layout)
        _, theirs = _run(other, batch, layout=layout)
    assert not torch.equal(own, theirs)
    replayed = replace(batch, routes=theirs)
    found, taken = _run(model, replayed, layout=layout, replay=True)
    assert torch.equal(taken, theirs)
    assert (found - free).abs().max() > 1e-3
    # What a token's experts weigh is the live router's, so it has a gradient.
    routers = [
        n for n, _ in model.named_parameters() if "gate.weight" in n or "router" in n.split(".")
    ]
    grads = gradients(model, found.sum())
    assert routers
    assert all(grads[n].abs().max() > 0 for n in routers)
    # Their own routes change nothing, and recomputation takes them again.
    same, _ = _run(model, replace(batch, routes=own), layout=layout, replay=True)
    assert torch.equal(same, free)
    forward = PackedForward(model, layout, recompute=True, replay=True)
    again = gradients(model, forward.logprobs(replayed, TEMPERATURE)[0].sum())
    assert off(again, grads) < 1e-5


def test_unknown_routes_are_the_routers():
    model, other = families.make("qwen3_moe"), families.make("qwen3_moe", seed=1)
    batch = packing.build(items(), False, CPU)
    with torch.no_grad():
        _, own = _run(model, batch)
        _, theirs = _run(other, batch)
        theirs[::2] = -1
        _, taken = _run(model, replace(batch, routes=theirs), replay=True)
    assert torch.equal(taken[1::2], theirs[1::2])
    first = len(batch.tokens[:1])
    assert torch.equal(taken[:first, 0], own[:first, 0])  # nothing before it has changed


@pytest.mark.parametrize("first", [0, 1])
def test_a_shared_prompt_has_the_routes_of_a_sample_that_brings_them(first):
    one = [item for item in items() if item.group == 0][:2]
    known = np.arange(5)[:, None, None] + np.zeros((1, 1, 2), np.int16)
    given = [replace(i, sample=replace(i.sample, routes=known.astype(np.int16))) for i in one]
    batch = packing.build([*one[:first], given[first], *one[first + 1 :]], True, CPU)
    assert batch.routes is not None
    assert batch.routes[:5, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert bool((batch.routes[5:] == -1).all())


def test_layers_are_found_where_all_have_a_place():
    """vLLM numbers routes by the model's layers; the first one here has no experts."""
    model = families.make("glm4_moe")
    (mixture,) = mixtures_of(model)
    assert (mixture.place, mixture.layer) == (0, 1)
    batch = packing.build(items(), False, CPU)
    routes = torch.full((len(batch.tokens), 2, 2), -1)
    routes[:, 1] = torch.tensor([3, 1])
    with torch.no_grad():
        _, taken = _run(model, replace(batch, routes=routes), replay=True)
    assert torch.equal(taken, routes[:, 1:])


def _routed(model, count):
    """The groups with the routes of ``model`` for the first ``count`` tokens of each sequence."""
    found = []
    for group in groups():
        samples = []
        for sample in group.samples:
            item = packing.Item(sample, 1.0, 0)
            with torch.no_grad():
                _, routes = _run(model, packing.build([item], False, CPU))
            samples.append(replace(sample, routes=routes[:count].numpy().astype(np.int16)))
        found.append(replace(group, samples=tuple(samples)))
    return found


@pytest.mark.parametrize("settings", [{"packing": "padded"}, {"packing": "prompt_shared"}])
def test_a_trainer_replays_what_samples_bring(settings):
    """Prompts have other routes under another model: shared ones have one of theirs."""
    model, other = families.make("qwen3_moe"), families.make("qwen3_moe", seed=1)
    outcomes = {}
    for name, samples in (
        ("none", groups()),
        ("own", _routed(model, None)),
        ("other's", _routed(other, None)),
        ("other's first", _routed(other, 3)),
    ):
        trainer = make_trainer(model, router_replay=True, beta=0.1, **settings)
        trainer.accumulate(samples)
        outcomes[name] = gradient(trainer).clone()
    assert torch.allclose(outcomes["none"], outcomes["own"], atol=1e-5)
    assert not torch.allclose(outcomes["none"], outcomes["other's"], atol=1e-2)
    assert not torch.allclose(outcomes["other's first"], outcomes["other's"], atol=1e-2)
    assert not torch.allclose(outcomes["other's first"], outcomes["none"], atol=1e-2)
    plain = make_trainer(model, beta=0.1, **settings)
    plain.accumulate(_routed(other, None))
    assert torch.allclose(gradient(plain), outcomes["none"], atol=1e-5)


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(ValueError, match=r"train\.router_replay: no mixture of experts was found"):
        make_trainer(families.make("qwen3"), router_replay=True)
    model = families.make("phimoe", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ValueError, match=r"train\.router_replay: PhimoeSparseMoeBlock does not"):
        PackedForward(model, replay=True)
    model = families.make("llama4_text")
    with pytest.raises(ValueError, match=r"train\.router_replay: .* padded rows"):
        PackedForward(clone(model), fit_of(model).layout, replay=True)
