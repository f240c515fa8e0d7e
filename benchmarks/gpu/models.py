"""Random models in the shapes of Qwen2.5, made on this machine; what the GPU benchmark measures on.

No hub is asked. Weights are random, so responses mean nothing; their lengths are forced, or follow
from how many tokens end a response.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import platform
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2Tokenizer

CONTEXT = 2048

_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_KEYS += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_KEYS, values, strict=True))
    for name, values in {
        "tiny": (64, 160, 2, 4, 2, 512, True),
        "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
        "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
        "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    }.items()
}


def shape_of(name: str, **changes: Any) -> Qwen2Config:
    """The configuration; nothing ends a response unless ``changes`` say so."""
    usual = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    usual["max_position_embeddings"] = CONTEXT
    return Qwen2Config(**(SHAPES[name] | usual | changes))


def random_model(name: str, device: str, **changes: Any) -> Any:
    """A model in evaluation mode on the device: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape_of(name, **changes), dtype=dtype)
    return model.eval()


def write_checkpoint(
    folder: Path, name: str, device: str, *, mean_length: int, **changes: Any
) -> None:
    """A checkpoint with a byte tokenizer whose responses end after ``mean_length`` tokens or so."""
    from tokenizers.pre_tokenizers import ByteLevel

    size = SHAPES[name]["vocab_size"]
    letters = sorted(ByteLevel.alphabet())
    words = ["<pad>", "<eos>", *letters]
    words += [f"<{i}>" for i in range(size - len(words))]
    ends = [1, *range(size - size // mean_length + 1, size)]
    random_model(name, device, eos_token_id=ends, **changes).save_pretrained(folder)
    Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=[],
        unk_token="<pad>",
        eos_token="<eos>",
        pad_token="<pad>",
        model_max_length=CONTEXT,
    ).save_pretrained(folder)


def hardware() -> dict[str, str]:
    """The machine's name and versions; ``device`` is the kind that was measured."""
    found = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found |= {"device": "cuda", "name": name, "cuda": str(torch.version.cuda)}
        found["memory_gb"] = f"{torch.cuda.get_device_properties(0).total_memory / 1e9:.0f}"
        return found
    return found | {"device": "cpu", "name": cpu_name(), "cores": str(os.cpu_count())}


def cpu_name() -> str:
    """The processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def forget(device: str) -> None:
    """Give memory that nobody refers to back."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
