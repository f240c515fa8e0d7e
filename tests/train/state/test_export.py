"""Weights that are written as they come."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from tiny_models import clone, make_model, make_tokenizer
from transformers import AutoModelForCausalLM

from rollpacker.train.state import checkpoint
from rollpacker.train.state.checkpoint import with_older_fields, write_weights


def _layout(model):
    return {name: (p.dtype, p.shape) for name, p in model.named_parameters()}


def _live(model):
    return ((name, p.detach()) for name, p in model.named_parameters())


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("limit", [1, 5000, 1 << 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_of_any_size_load_as_transformers_own_do(family, limit, dtype, tmp_path):
    model = make_model(family).to(dtype)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    model.save_pretrained(theirs)
    checkpoint.save_model(ours, clone(model), make_tokenizer(), _layout(model), _live(model))
    config = json.loads((theirs / "config.json").read_text())
    assert json.loads((ours / "config.json").read_text()) == with_older_fields(config)
    if limit < 1 << 30:
        (ours / "model.safetensors").unlink()
        write_weights(ours, _layout(model), _live(model), limit)
        index = json.loads((ours / "model.safetensors.index.json").read_text())
        assert list(index["weight_map"]) == [name for name, _ in model.named_parameters()]
        sizes = {f: (ours / f).stat().st_size for f in set(index["weight_map"].values())}
        assert len(sizes) == (len(index["weight_map"]) if limit == 1 else len(sizes)) > 1
    loaded = AutoModelForCausalLM.from_pretrained(ours, dtype="auto")
    assert loaded.dtype == dtype
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, model.get_parameter(name)), name


def test_one_weight_is_held_at_a_time(tmp_path):
    """Each has left the writer's hands before the next is made."""
    layout = {f"w{n}": (torch.float32, torch.Size((64, n))) for n in range(1, 9)}
    made = []

    def weights():
        for name, (_, shape) in layout.items():
            assert not any(each() is not None for each in made)
            weight = torch.ones(shape)
            made.append(weakref.ref(weight))
            yield name, weight
            del weight

    write_weights(tmp_path, layout, weights())
    assert len(made) == len(layout)
