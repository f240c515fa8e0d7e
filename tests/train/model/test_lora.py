"""What LoRA shares, names and writes."""

from __future__ import annotations

import json
import warnings

import families
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import FAMILIES, clone, group_batch, make_model

from rollpacker.checkpoint_names import stored
from rollpacker.config import GRPOConfig, ModelConfig, TrainConfig
from rollpacker.engine.mini.runner import copy_weights
from rollpacker.train.model.adapters import bare_weights, merged_weights
from rollpacker.train.model.lora import add_adapters, engine_copy
from rollpacker.train.trainer import Trainer


def _adapted(model, tokenizer, path="."):
    config = TrainConfig(learning_rate=0.05, micro_batch_tokens=100)
    lora = ModelConfig(path=path, lora_rank=4)
    return Trainer(model, tokenizer, config, temperature=1.0, lora=lora)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_copy_takes_the_merged_weights_and_shares_the_rest(family, tokenizer):
    model = make_model(family)
    names = [n for n, _ in model.named_parameters()]
    copied = engine_copy(model)
    trainer = _adapted(model, tokenizer)
    base = {n: p.clone() for n, p in clone(copied).named_parameters()}
    trainer.apply(trainer.accumulate(group_batch(clone(copied), GRPOConfig())))
    copy_weights(copied, trainer.weights())
    assert [n for n, _ in copied.named_parameters()] == names
    own = {p.data_ptr() for p in model.parameters()}
    for name, parameter in copied.named_parameters():
        projection = "_proj.weight" in name
        assert (parameter.data_ptr() not in own) == projection, name
        assert torch.equal(parameter, base[name]) != projection, name


def test_adapters_name_their_base_model(tmp_path, monkeypatch, tokenizer):
    """A folder by its absolute path, so that it is found from anywhere; a hub name as it is."""
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    for place, named in (("base", str(tmp_path / "base")), ("Qwen/Qwen2.5-0.5B", None)):
        saved = tmp_path / f"saved-{named is None}"
        _adapted(make_model(), tokenizer, place).save(saved)
        found = json.loads((saved / "adapter" / "adapter_config.json").read_text())
        assert found["base_model_name_or_path"] == (named or place)
        # In the checkpoint's own folder transformers would put the adapters on merged weights.
        assert not (saved / "adapter_config.json").exists()


def test_adapters_are_added_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapters(make_model(), ModelConfig(path=".", lora_rank=2))


def _moved(adapted):
    """Adapters are zero at first."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    return adapted


def _assert_merged(adapted, base):
    """The base model with the merged weights computes what the adapted one does."""
    weights = dict(merged_weights(adapted.get_base_model()))
    assert list(weights) == [name for name, _ in stored(base)]
    ids = torch.arange(3, 33).view(2, 15)
    with torch.no_grad():
        before, wanted = base(ids).logits, adapted(ids).logits
        base.load_state_dict(weights, strict=False)
        found = base(ids).logits
    assert (wanted - before).abs().max() > 0.1
    limit = 2e-5 * max(1.0, float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)


GEMMA4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2} | {
    "moe_intermediate_size": 32
}
MIXTURES = {
    **dict.fromkeys(("qwen3_moe", "deepseek_v3", "llama4_text", "mixtral"), ("self_attn",)),
    "gemma4_text": ("self_attn",),
    "granitemoehybrid": ("self_attn", "mamba"),
}
"""What of a layer mixes tokens."""


@pytest.mark.parametrize("kind", MIXTURES)
def test_in_a_mixture_of_experts_routers_and_feed_forward_layers_have_no_adapters(kind):
    base = families.make(kind, **(GEMMA4 if kind == "gemma4_text" else {}))
    adapted = _moved(add_adapters(clone(base), ModelConfig(path=".", lora_rank=4)))
    names = [name for name, _ in adapted.named_parameters() if ".lora_A" in name]
    placed = [name.split(".layers.")[1].split(".")[1] for name in names]
    assert set(placed) == set(MIXTURES[kind])
    _assert_merged(adapted, base)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft")
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_adapters_on_fused_experts_are_merged(kind):
    """peft wraps the tensors of one module one around the other; a router has a buffer too."""
    base = families.make(kind)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = _moved(get_peft_model(clone(base), config)).eval()
    assert any("experts.base_layer.lora_A" in name for name, _ in adapted.named_parameters())
    _assert_merged(adapted, base)
    own = list(bare_weights(adapted.get_base_model()))
    assert [name for name, _ in own] == [name for name, _ in stored(base)]


def test_merged_weights_are_exported_by_the_checkpoints_names(tokenizer, tmp_path):
    base = families.make("qwen3_moe")
    config = TrainConfig(learning_rate=0.05, micro_batch_tokens=100)
    trainer = Trainer(
        clone(base), tokenizer, config, temperature=1.0, lora=ModelConfig(path=".", lora_rank=2)
    )
    weights = dict(trainer.weights())
    base.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == saved.keys() == trainer.layout.keys()
    assert all(torch.equal(weights[name], saved[name]) for name in saved)
