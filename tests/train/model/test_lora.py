"""What LoRA shares, names and writes."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from conftest import FAMILIES, clone, group_batch, make_model

from rollpacker.config import GRPOConfig, ModelConfig, TrainConfig
from rollpacker.engine.mini.weights import copy_weights
from rollpacker.train.local import LocalTrainer
from rollpacker.train.model.lora import add_adapters, engine_copy


def _adapted(model, tokenizer, path="."):
    config = TrainConfig(learning_rate=0.05, micro_batch_tokens=100)
    lora = ModelConfig(path=path, lora_rank=4)
    return LocalTrainer(model, tokenizer, config, temperature=1.0, lora=lora)


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
