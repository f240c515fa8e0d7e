"""What trainers decide as they are made: what is trained, in which layout, over which processes."""

from __future__ import annotations

import families
import pytest
import torch
from family_cases import CLOSE, groups
from gang import held, make_trainer, place, run
from tiny_models import clone, group_batch, make_model
from transformers import AutoModelForCausalLM

from rollpacker.config import GRPOConfig, ModelConfig
from rollpacker.job.plan.defaults import shape_of_config
from rollpacker.train.model import packing
from rollpacker.train.model.forward import freeze_other_parts
from rollpacker.train.model.lora import add_adapters
from rollpacker.train.model.packing import Costs, Item, deal


def _model():
    return families.make("gemma3", **families.COMPOSED)


def _seen(name):
    return "vision_tower" in name or "multi_modal_projector" in name


def _updated(model, at, **settings):
    trainer = make_trainer(model, at, weight_decay=0.1, **settings)
    for _ in range(2):
        trainer.apply(trainer.accumulate(groups()))
    return trainer


def _both_trainers(_rank, _folder):
    here, model = place(2), _model()
    before = held(make_trainer(model))
    assert any(map(_seen, before))
    for settings in ({"beta": 0.1}, {"rank": 2}, {"gradient_checkpointing": True}):
        local, spread = (_updated(model, at, **settings) for at in (None, here))
        after, other = held(local), held(spread)
        assert after.keys() == other.keys() == before.keys()
        for name, weight in before.items():
            if _seen(name):
                assert torch.equal(after[name], weight), name
                assert torch.equal(other[name], weight), name
            else:
                assert float((after[name] - other[name]).abs().max()) < CLOSE, name
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        matrices = {n for n, w in before.items() if w.ndim == 2 and not _seen(n)}
        if "rank" in settings:
            matrices = {n for n in matrices if n.endswith("_proj.weight")}
        assert changed >= matrices
        for trainer in (local, spread):
            assert not any(_seen(name) for name in trainer._optimizer.state()["master"])


@pytest.mark.wide
def test_vision_is_exported_as_it_came_whoever_trains(tmp_path):
    run(_both_trainers, 2, tmp_path / "gang")


def _with_an_exact_router(_rank, _folder):
    here, model = place(2), families.make("deepseek_v2").to(torch.bfloat16)
    router = model.model.layers[1].mlp.gate.float()
    assert router.weight.dtype == torch.float32
    local, spread = (make_trainer(model, at, gradient_checkpointing=True) for at in (None, here))
    one, other = (trainer.score(groups()) for trainer in (local, spread))
    assert all((one[key] == other[key]).all() for key in one)
    spread.apply(spread.accumulate(groups()))
    after = dict(spread.weights())["model.layers.1.mlp.gate.weight"]
    assert after.dtype == torch.float32
    assert not torch.equal(after, router.weight)


@pytest.mark.wide
def test_what_a_family_keeps_in_float32_is_computed_in_it(tmp_path):
    run(_with_an_exact_router, 2, tmp_path / "gang")


def _without_layers(_rank, _folder):
    model = families.make("llama")
    model._no_split_modules = None
    make_trainer(model)
    with pytest.raises(
        ValueError, match=r"trainer\.kind=fsdp: .* no layers to shard for llama models"
    ):
        make_trainer(model, place(1))


def test_a_model_whose_layers_are_not_known_is_not_spread(tmp_path):
    run(_without_layers, 1, tmp_path / "gang")


def test_only_the_model_of_text_has_adapters():
    adapted = add_adapters(_model(), ModelConfig(path=".", lora_rank=2))
    names = [name for name, _ in adapted.named_parameters() if ".lora_A" in name]
    assert len(names) == 2 * 7
    assert all(".language_model.layers." in name for name in names)


def test_other_models_are_trained_whole():
    for name in ("llama, tied", "opt", "gpt2", "bloom"):
        model = families.make(name)
        freeze_other_parts(model)
        assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["gemma3", "qwen3"])
def test_weights_of_other_parts_are_counted(name):
    model = _model() if name == "gemma3" else families.make(name)
    shape = shape_of_config(model.config, "it")
    assert shape.held == sum(p.numel() for p in model.parameters())
    frozen = clone(model)
    freeze_other_parts(frozen)
    assert shape.parameters == sum(p.numel() for p in frozen.parameters() if p.requires_grad)
    assert (shape.frozen > 0) == (name == "gemma3")
    with torch.device("meta"):
        text = AutoModelForCausalLM.from_config(model.config.get_text_config())
    assert shape.parameters == sum(p.numel() for p in text.parameters())


# How a replica's members divide its micro-batches.


def _plans(count, budget, mode):
    groups = group_batch(make_model(), GRPOConfig(), count=count)
    items = [
        Item(s, float(a), n)
        for n, g in enumerate(groups)
        for s, a in zip(g.samples, g.advantages, strict=True)
    ]
    return packing.plan(items, budget, mode, Costs(1.0, 0.0))[0], items


@pytest.mark.parametrize("mode", ["padded", "prompt_shared"])
@pytest.mark.parametrize("members", [1, 2, 3, 8, 30])
@pytest.mark.parametrize(("count", "budget"), [(1, 10_000), (5, 100), (5, 1)])
def test_every_response_counts_once_and_members_run_equally_many(mode, members, count, budget):
    plans, items = _plans(count, budget, mode)
    dealt = [deal(plans, member, members) for member in range(members)]
    assert len({len(each) for each in dealt}) == 1
    counted = [i for each in dealt for plan, counts in each if counts for i in plan]
    assert sorted(map(id, counted)) == sorted(map(id, items))
    repeated = sum(not counts for each in dealt for _, counts in each)
    # A micro-batch is repeated only where every response has one of its own.
    assert not repeated or all(len(p) == 1 for each in dealt for p, counts in each if counts)
    if members == 1:
        assert [plan for plan, _ in dealt[0]] == plans


def test_a_cut_leaves_about_as_many_tokens_on_both_sides():
    plans, items = _plans(1, 10_000, "padded")
    one, two = (deal(plans, member, 2)[0][0] for member in range(2))
    tokens = [sum(i.prompt_length + i.inputs for i in part) for part in (one, two)]
    assert abs(tokens[0] - tokens[1]) <= 2 * max(i.prompt_length + i.inputs for i in items)


def test_nothing_to_run_is_nothing_for_all():
    assert [deal([], member, 3) for member in range(3)] == [[], [], []]
