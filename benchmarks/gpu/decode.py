"""Decoding: tokens a second of ``mini`` and of transformers' ``generate``, and what memory allows.

    python -m benchmarks.gpu.decode --device cuda

The limit is that of reading all weights once and every sequence's keys and values once a step, at
the rate at which the device copies its own memory. It ignores arithmetic, which counts at large
batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks._run import flags, table
from benchmarks.gpu.models import forget, random_model, synchronize
from rollpacker.config import MiniEngineConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Request, SamplingParams
from rollpacker.engine.mini import MiniEngine

PROMPT = 128
STEPS = {"cuda": 32, "cpu": 4}
PLANS = {
    "cuda": (("0.5B", "1.5B", "7B"), (1, 16, 64, 256)),
    "cpu": (("tiny",), (1, 8)),
}


def copy_rate(device: str) -> float:
    """Bytes a second that the device reads and writes when it copies its own memory."""
    size = 1 << (30 if device == "cuda" else 24)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    synchronize(device)
    return 20 * size / (time.perf_counter() - begun)


def step_bytes(model: Any, batch: int, context: int) -> int:
    """Bytes that a decode step must read."""
    config = model.config
    weights = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    head_dim = config.hidden_size // config.num_attention_heads
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return weights + batch * context * kv * next(model.parameters()).element_size()


def mini_rate(model: Any, batch: int, steps: int, device: str) -> float:
    """Tokens a second of the built-in engine, after the prompts."""
    room = batch * (PROMPT + steps + 64)
    engine = MiniEngine(model, config=MiniEngineConfig(max_running=batch, kv_tokens=room))
    prompt = np.arange(PROMPT, dtype=np.int32) % model.config.vocab_size
    params = SamplingParams(max_tokens=steps + 8, ignore_stop=True)
    ids = [AttemptId(i) for i in range(batch)]
    engine.submit(
        [
            Request(attempt=i, group=PromptId("p"), prompt=prompt, params=params, seed=int(i))
            for i in ids
        ]
    )
    for _ in range(3):
        engine.step()
    synchronize(device)
    begun = time.perf_counter()
    for _ in range(steps):
        engine.step()
    synchronize(device)
    rate = batch * steps / (time.perf_counter() - begun)
    assert engine.stats().running == batch
    engine.abort(ids)
    return rate


@torch.no_grad()
def generate_rate(model: Any, batch: int, steps: int, device: str) -> float:
    """Tokens a second of transformers' ``generate``, the first token and the prompts left out."""
    prompt = torch.arange(PROMPT, device=device) % model.config.vocab_size
    ids = prompt.expand(batch, -1).contiguous()
    mask = torch.ones_like(ids)

    def seconds(tokens: int) -> float:
        synchronize(device)
        begun = time.perf_counter()
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=tokens
        )
        synchronize(device)
        assert out.shape == (batch, PROMPT + tokens)
        return time.perf_counter() - begun

    seconds(2)
    return batch * steps / max(1e-9, seconds(steps + 1) - seconds(1))


def main() -> None:
    choices = {"choices": tuple(PLANS), "default": "cpu"}
    device = flags(__doc__, device=choices).parse_args().device
    names, batches = PLANS[device]
    rate = copy_rate(device)
    print(f"the device copies {rate / 1e9:,.0f} GB/s\n")
    table(
        ("shape", "batch", "mini tokens/s", "generate tokens/s", "mini of the limit"),
        ([n, batch, *cells] for n in names for batch, cells in measured(n, batches, device, rate)),
    )


def measured(
    name: str, batches: Sequence[int], device: str, rate: float
) -> Iterator[tuple[int, list[str]]]:
    """A row for each batch."""
    model, steps = random_model(name, device), STEPS[device]
    for batch in batches:
        limit = batch * rate / step_bytes(model, batch, PROMPT + steps // 2)
        mini = mini_rate(model, batch, steps, device)
        forget(device)
        plain = generate_rate(model, batch, steps, device)
        forget(device)
        yield batch, [f"{mini:,.0f}", f"{plain:,.0f}", f"{mini / limit:.1%}"]


if __name__ == "__main__":
    main()
