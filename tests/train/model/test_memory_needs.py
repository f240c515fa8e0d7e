"""What the arithmetic of ``sim/memory/needs.py`` says is what tensors take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import families
import numpy as np
import pytest
import torch
from gang import make_trainer, place, run
from tiny_models import make_groups, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from rollpacker.config import GRPOConfig, MiniEngineConfig, ModelConfig, parse
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.cpu.lanes import COLUMNS, HAS_BF16_DOT
from rollpacker.job.plan.defaults import shape_of_config
from rollpacker.sim.costs.models import ModelShape
from rollpacker.sim.memory import needs as engine_memory
from rollpacker.sim.memory import needs as estimate_memory
from rollpacker.sim.memory import needs as working_set
from rollpacker.sim.memory.needs import JobMachine
from rollpacker.train.algorithms import build
from rollpacker.train.mesh import part
from rollpacker.train.model import token_logprobs
from rollpacker.train.model.lora import add_adapters, engine_copy

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
DTYPES = ("float32", "bfloat16")


def model_of(family, dtype, **changes):
    return make_model(family, **(SIZES | changes)).to(getattr(torch, dtype))


def shape_of(model):
    return ModelShape.from_config(model.config.to_dict(), "it")


def job(dtype="float32", rank=0, **sections):
    """A job with such a model."""
    tree = {
        "model": {"path": "it", "dtype": dtype, "lora_rank": rank},
        "data": {"path": "d"},
        "rewards": [{"function": "math"}],
        "rollout": {"max_completion_length": 32},
    }
    return parse(tree | sections)


def needs(config, model, workers=1, shape=None):
    machine = JobMachine(
        name="CPU",
        cuda=False,
        devices=1,
        device_bytes=1e9,
        workers=workers,
        on_device=workers,
        packed=2 if HAS_BF16_DOT else 4,
    )
    found = estimate_memory.needs(config, shape or shape_of(model), machine)
    return {part.name: part.size for part in found.worker}


def storages(tensors):
    """Bytes of their storages, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def held(trainer):
    """Bytes of what a trainer holds, after an update."""
    groups = make_groups(make_model(**SIZES), build(GRPOConfig()))
    trainer.apply(trainer.accumulate(groups))
    named = dict(trainer._model.named_parameters())
    optimizer = trainer._optimizer
    state = optimizer.state()
    own = {part(p).data_ptr() for p in named.values()}
    masters = [part(m) for m in state["master"].values() if part(m).data_ptr() not in own]
    moments = [part(m) for kind in ("exp_avg", "exp_avg_sq") for m in state[kind].values()]
    adapters = [part(p) for name, p in named.items() if ".lora_" in name]
    return {
        "weights": storages(part(p) for name, p in named.items() if ".lora_" not in name),
        "masters": storages(masters),
        "adapters": storages(adapters),
        "gradient sums": storages([optimizer.sums]),
        "AdamW moments": storages(moments),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize(
    "family", ["qwen2", pytest.param("qwen3", marks=pytest.mark.wide), "llama"]
)
def test_a_trainer_holds_what_was_said(family, dtype, rank) -> None:
    model = model_of(family, dtype)
    said = needs(job(dtype, rank), model)
    for name, size in held(make_trainer(model, rank=rank)).items():
        assert size == said.get(name, 0), name


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma2", "phi3", "gpt2", "gpt_neox", "opt", "bloom", "qwen3_5_text", "jamba"),
        *("qwen3_moe", "qwen3_5_moe_text", "gemma4_text", "granitemoehybrid", "nemotron_h"),
        *("falcon_h1", "lfm2", "nemotron_h, experts", "gemma3"),
    ],
)
def test_adapters_are_counted_as_they_are_put(name) -> None:
    model = families.make(name, **(families.COMPOSED if name == "gemma3" else {}))
    said = shape_of_config(model.config, "it").adapter_parameters(3)
    adapted = add_adapters(model, ModelConfig(path=".", lora_rank=3))
    assert said == sum(p.numel() for n, p in adapted.named_parameters() if ".lora_" in n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [0, 3])
def test_what_is_frozen_is_held_as_it_came(dtype, rank) -> None:
    """Vision: weights, and nothing that trains them."""
    model = families.make("gemma3", **families.COMPOSED).to(getattr(torch, dtype))
    shape = shape_of_config(model.config, "it")
    said = needs(job(dtype, rank), model, shape=shape)
    for name, size in held(make_trainer(model, rank=rank)).items():
        assert size == said.get(name, 0), name


def spread(rank, _folder):
    """Uneven parts are rounded up to rows, by 2 % here."""
    for dtype in DTYPES:
        model = model_of("qwen2", dtype)
        said = needs(job(dtype, trainer={"kind": "fsdp", "shard": 2}), model, workers=2)
        found = held(make_trainer(model, place(2)))
        for name in ("weights", "gradient sums", "AdamW moments"):
            assert found[name] == pytest.approx(said[name], rel=0.02), name
        assert found["masters"] == 0 == said.get("masters", 0)


@pytest.mark.slow
def test_a_spread_trainer_holds_its_part(tmp_path) -> None:
    run(spread, 2, tmp_path / "gang")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_of_a_cpu_packs_and_caches_what_was_said(dtype) -> None:
    model = model_of("qwen2", dtype)
    config = job(dtype, engine={"kind": "mini", "kv_tokens": 512, "max_running": 4})
    said = needs(config, model)
    assert isinstance(config.engine, MiniEngineConfig)
    runner = MiniEngine(model, config=config.engine)._runner
    packed, embed = runner._weights.panels, runner._weights.embed
    own = embed.ctypes.data != model.get_input_embeddings().weight.data_ptr()
    assert packed.nbytes + own * embed.nbytes == said["packed weights"]
    keys, values = runner._cache[:2]
    assert keys.nbytes + values.nbytes == said["KV cache"]
    assert COLUMNS == engine_memory._COLUMNS


def test_merged_adapters_take_a_copy_of_the_linear_layers() -> None:
    model = model_of("qwen3", "bfloat16")
    said = needs(job("bfloat16", rank=4), model)["engine's weights"]
    shared = {p.data_ptr() for p in model.parameters()}
    copies = [p for p in engine_copy(model).parameters() if p.data_ptr() not in shared]
    assert storages(copies) == said


class Saved:
    """Storages that a forward keeps for its backward."""

    def __init__(self, model):
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept = {}

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self.kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    @property
    def bytes(self):
        return sum(size for size, _ in self.kept.values())


def same_lengths(groups):
    """Without padding: prompts of 3 tokens, responses of 30."""

    def cut(sample):
        tokens, logprobs = np.resize(sample.tokens, 30), np.resize(sample.logprobs, 30)
        prompt = np.resize(sample.prompt_tokens, 3)
        return replace(sample, prompt_tokens=prompt, tokens=tokens, logprobs=logprobs)

    return [replace(group, samples=tuple(map(cut, group.samples))) for group in groups]


@pytest.mark.parametrize(
    ("dtype", "rank", "recompute"),
    [
        ("float32", 0, False),
        pytest.param("bfloat16", 0, False, marks=pytest.mark.slow),
        ("bfloat16", 4, False),
        ("float32", 0, True),
    ],
)
def test_activations_are_about_those_that_are_saved(dtype, rank, recompute) -> None:
    wide = SIZES | {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 6}
    model = model_of("qwen2", dtype, **wide)
    options = {"gradient_checkpointing": recompute, "micro_batch_tokens": 100_000}
    trainer = make_trainer(model, rank=rank, packing="padded", **options)
    groups = same_lengths(make_groups(make_model(**SIZES), build(GRPOConfig()), count=16))
    (share,) = trainer._shares(trainer._with_gradient(groups))
    saved = Saved(trainer._model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        trainer._logprobs(share.batch)
    config, shape, tokens = (
        job(dtype, rank, train=options),
        shape_of(model),
        len(share.batch.tokens),
    )
    said = working_set.activations(config, shape, tokens, cuda=False)
    if recompute:  # a layer's own come in the backward pass
        said -= working_set.layer_token_bytes(config, shape, shape.blocks[0], cuda=False) * tokens
    assert saved.bytes == pytest.approx(said, rel=0.1)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2_moe", "qwen3_next", "deepseek_v3"])
def test_adapters_are_as_many_as_are_counted(kind: str) -> None:
    model = families.make(kind)
    shape = ModelShape.from_config(model.config.to_dict(), kind)
    adapted = add_adapters(model, ModelConfig(path="it", lora_rank=3))
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == shape.adapter_parameters(3)


WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
}
EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mixtral", EXPERTS | {"intermediate_size": 512}),
        ("gemma3_text", {"intermediate_size": 1024, "sliding_window": 32}),
    ],
)
def test_activations_of_a_layer_of_other_families(kind: str, fields: dict[str, Any]) -> None:
    """As transformers' own layers save them: one more layer, by its difference."""

    def saved(layers: int) -> int:
        config = AutoConfig.for_model(kind, **WIDE, **fields, num_hidden_layers=layers)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        kept = Saved(model)
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            model.get_decoder()(torch.arange(128)[None] % 64, use_cache=False)
        return kept.bytes

    config = AutoConfig.for_model(kind, **WIDE, **fields, num_hidden_layers=1)
    (layer,) = (shape := ModelShape.from_config(config.to_dict(), kind)).blocks
    said = working_set.layer_token_bytes(job("bfloat16", 0), shape, layer, cuda=False)
    assert (saved(3) - saved(2)) / 128 == pytest.approx(said, rel=0.1)


def test_the_loss_holds_as_many_logits_as_are_counted() -> None:
    assert working_set.LOGITS == token_logprobs._CHUNK_ELEMENTS
