"""Tiny models of every family with a real tokenizer, and what they answer greedily."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollpacker.config import MiniEngineConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.demo.model import build_tokenizer
from rollpacker.engine.base import Output, Request, SamplingParams
from rollpacker.engine.mini import MiniEngine

FAMILIES: dict[str, tuple[Any, Any, bool]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, True),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, False),
    "llama": (LlamaConfig, LlamaForCausalLM, False),
}
"""Configuration, model, and whether embeddings are tied."""
MOST = 24
"""Longest greedy answer."""


def write_family(folder: Path, family: str, dtype: str) -> Path:
    """A random model whose greedy answers are no constant; heads as in the engine's tests, which
    have their kernels compiled."""
    tokenizer: Any = build_tokenizer()
    shape, build, tied = FAMILIES[family]
    config = shape(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4 if dtype == "float32" else 6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ask(attempt: int, prompt: Any, *, group: str = "", seed: int = 0, **params: Any) -> Request:
    """A request of the tests' model."""
    return Request(
        attempt=AttemptId(attempt),
        group=PromptId(group or f"g{attempt}"),
        prompt=np.asarray(prompt, np.int32),
        params=SamplingParams(max_tokens=MOST, **params),
        seed=seed,
    )


def load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def merged_by_peft(base: Path, checkpoint: Path, dtype: torch.dtype) -> Any:
    """What a user of peft makes of a run: its adapters on the base model, merged."""
    adapted: Any = PeftModel.from_pretrained(load(base, dtype), str(checkpoint / "adapter"))
    return adapted.merge_and_unload().eval()


def engine_answer(model: Any, prompt: list[int], stop: int) -> Output:
    """The greedy answer by the built-in engine."""
    engine = MiniEngine(model, config=MiniEngineConfig(max_running=2))
    engine.submit([ask(0, prompt, temperature=0.0, stop_token_ids=(stop,))])
    while True:
        for output in engine.step():
            return output


@torch.no_grad()
def transformers_answer(model: Any, prompt: list[int], stop: int) -> list[int]:
    """The greedy answer by transformers' own ``generate``, its end token included."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=MOST, eos_token_id=stop
    )
    return out[0, len(prompt) :].tolist()


def encode(folder: Path, text: str) -> list[int]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer(text)["input_ids"]
