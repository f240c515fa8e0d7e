"""Weights that are written as they come."""

from __future__ import annotations

import json
import re
import sys
import weakref
from pathlib import Path

import pytest
import torch
from gang import TIMEOUT, make_trainer, place, run
from tiny_models import clone, make_model, make_tokenizer
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

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


# How much memory the export of a replica over two processes takes at its peak, really measured.


def resident(key: str) -> int:
    """Bytes: ``VmRSS`` now, ``VmHWM`` at its peak."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{key}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) * 1024


def large() -> Qwen2ForCausalLM:
    """Eight layers of 17 MB, embeddings of 8 MB."""
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config)


def exported(rank: int, folder: Path) -> None:
    model = large()
    layer = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    trainer = make_trainer(model, place(2, TIMEOUT))
    assert whole > 7 * layer
    del model
    for step in range(2):  # the first one's buffers of the library stay
        out = folder / f"{step}-{rank}"
        out.mkdir()
        weights = trainer.weights()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
        before = resident("VmRSS")
        if rank == 0:
            tokenizer = make_tokenizer()
            checkpoint.save_model(out, trainer._model, tokenizer, trainer.layout, weights)
        for _ in weights:
            pass
        grown = resident("VmHWM") - before
    assert grown < 2 * layer, f"{grown / 1e6:.1f} MB more, a layer has {layer / 1e6:.1f}"


@pytest.mark.wide
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_export_takes_less_than_two_layers_more(tmp_path: Path) -> None:
    run(exported, 2, tmp_path)
