"""A tiny random judge with a tokenizer of single characters, and a model that scores, as
checkpoints."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from rollpacker.core.types import AttemptId
from rollpacker.demo.model import build_tokenizer
from rollpacker.reward.base import GradeRequest


def save_judge(folder: Path, seed: int = 0, context: int = 512) -> Path:
    """A three-layer Llama over printable characters."""
    words = {"<pad>": 0, "<eos>": 1} | {c: i for i, c in enumerate(string.printable, start=2)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(shape)
    with torch.no_grad():  # sharper than freshly made ones, so that answers differ
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else parameter.add_(0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_critic(folder: Path) -> Path:
    """A two-layer Qwen2 with one score."""
    tokenizer: Any = build_tokenizer()
    shape = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_labels=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen2ForSequenceClassification(shape)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def request(attempt: int, completion: str, prompt: Any = "1+1?", **row: Any) -> GradeRequest:
    return GradeRequest(
        attempt=AttemptId(attempt),
        prompt=prompt,
        completion=completion,
        completion_ids=[],
        row={"answer": "2"} | row,
    )
