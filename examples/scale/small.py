"""What ``cpu-four.yaml`` needs: a model whose heads four devices can share, prompts, a reward.

The model begins with random weights. It is to write digits, which it learns within a few steps.
"""

from __future__ import annotations

import sys
from pathlib import Path

MODEL = Path("runs/scale-model")
_CONTEXT = 256


def rows(size: int) -> list[dict[str, str]]:
    """Pairs of numbers."""
    return [{"id": str(n), "prompt": f"{n % 97} {n % 89}", "answer": ""} for n in range(size)]


def digits(completions: list[str], **_columns: object) -> list[float]:
    """The share of characters that are digits; 0 for an empty response."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def write_model(folder: Path) -> None:
    """0.3M parameters: a Qwen2 with four heads of 32, which vLLM's attention on a CPU can take."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    from rollpacker.demo.model import EOS_ID, PAD_ID, build_tokenizer

    logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    write_model(MODEL)
    sys.stdout.write(f"{MODEL}\n")
