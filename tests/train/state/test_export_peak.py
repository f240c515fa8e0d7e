"""How much memory the export of a replica over two processes takes at its peak, really measured."""

import re
import sys
from pathlib import Path

import pytest
import torch
from gang import TIMEOUT, make_trainer, place, run
from tiny_models import make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from rollpacker.train.state import checkpoint


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
