"""CPU seconds of a forward and backward pass over a micro-batch: the trainer's, with a copy of the
prompt for each response and with shared prompts, beside transformers' own over padded sequences.

python -m benchmarks.train.forward [--rounds 5]

Models have random weights in float32, of the demo's size and of SmolLM2-135M's shape. To compare
two revisions run it in both, in turn.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks._run import flags, table
from rollpacker.core.types import AttemptId, PromptId, Sample
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.packing import Item, numbered

SHAPES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int]]] = {
    "demo": (
        {"vocab_size": 18, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
        | {"num_attention_heads": 3, "num_key_value_heads": 1},
        (6, 8, 24, 60),
    ),
    "SmolLM2-135M": (
        {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
        | {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3},
        (2, 4, 40, 100),
    ),
}
"""Configurations, and of the batch: groups, responses of each, tokens of a prompt, and at most of a
response."""


def responses(vocabulary: int, groups: int, size: int, before: int, most: int) -> list[Item]:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(groups):
        prompt = rng.integers(2, vocabulary, before).astype(np.int32)
        for index in range(size):
            length = int(rng.integers(most // 3, most))
            samples.append(
                Sample(
                    prompt=PromptId(str(group)),
                    index=index,
                    attempt=AttemptId(len(samples)),
                    prompt_tokens=prompt,
                    tokens=rng.integers(2, vocabulary, length).astype(np.int32),
                    logprobs=np.zeros(length, np.float32),
                    finish_reason="stop",
                    weights_version=0,
                )
            )
    return numbered((sample, 1.0) for sample in samples)


def own_pass(model: Any, items: list[Item]) -> Callable[[], torch.Tensor]:
    """transformers' own: sequences padded on the right, logits of all of them."""
    whole = [np.concatenate((i.sample.prompt_tokens, i.sample.tokens)) for i in items]
    rows = [torch.from_numpy(tokens.astype(np.int64)) for tokens in whole]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    counted = torch.zeros(ids.shape, dtype=torch.bool)
    for row, item in zip(counted, items, strict=True):
        row[item.prompt_length : item.prompt_length + len(item.sample.tokens)] = True

    def run() -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[:, :, 0]
        return chosen[counted[:, 1:]]

    return run


def packed_pass(model: Any, items: list[Item], shared: bool) -> Callable[[], torch.Tensor]:
    forward, batch = PackedForward(model), packing.build(items, shared, torch.device("cpu"))
    return lambda: forward.logprobs(batch, 1.0)[0]


def main() -> None:
    rounds = flags(__doc__, rounds=5).parse_args().rounds
    torch.set_num_threads(1)
    lines = []
    for name, (settings, sizes) in SHAPES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", tie_word_embeddings=True, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        items = responses(settings["vocab_size"], *sizes)
        ways = {
            "transformers, padded": own_pass(model, items),
            "padded": packed_pass(model, items, False),
            "shared prompts": packed_pass(model, items, True),
        }
        values = [run().detach() for run in ways.values()]
        assert all(torch.allclose(value, values[0], atol=1e-4) for value in values)
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, run in ways.items():
                model.zero_grad()
                start = time.process_time()
                run().sum().backward()
                taken[way].append(time.process_time() - start)
        seconds = {way: statistics.median(each[1:]) for way, each in taken.items()}
        base = seconds["transformers, padded"]
        lines += [[f"{name}: {way}", f"{s:.3f}", f"{s / base:.2f}"] for way, s in seconds.items()]
    table(("", "CPU s", "of transformers'"), lines)


if __name__ == "__main__":
    main()
