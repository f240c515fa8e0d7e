"""Tiny random checkpoints of every supported architecture."""

from __future__ import annotations

import numpy as np

from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Output, Request, SamplingParams

VOCABULARY = 101
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


WIDE = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "tie_word_embeddings": True,
    "initializer_range": 0.18,
}
"""Heads of 32: vLLM's attention on a CPU has none that are smaller."""


def build(kind: str, share: int = 2):
    """A model with weights large enough that greedy decoding is no constant.

    ``share`` query heads have one key-value head; kernels are compiled for each share and dtype.
    """
    # Here, since transformers takes seconds to import and scripted engines need none of it.
    import torch
    import transformers as hf

    torch.manual_seed(7)
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.3}
    match kind:
        case "qwen2":
            model = hf.Qwen2ForCausalLM(
                hf.Qwen2Config(
                    hidden_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=share,
                    num_key_value_heads=1,
                    intermediate_size=80,
                    tie_word_embeddings=True,
                    **common,
                )
            )
        case "qwen3":
            model = hf.Qwen3ForCausalLM(
                hf.Qwen3Config(
                    hidden_size=40,
                    num_hidden_layers=3,
                    num_attention_heads=2 * share,
                    num_key_value_heads=2,
                    head_dim=32,
                    intermediate_size=72,
                    tie_word_embeddings=False,
                    **common,
                )
            )
        case "wide":
            model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**(common | WIDE)))
        case _:
            model = hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    hidden_size=36,
                    num_hidden_layers=2,
                    num_attention_heads=share,
                    num_key_value_heads=1,
                    head_dim=12,
                    intermediate_size=67,
                    attention_bias=True,
                    mlp_bias=True,
                    tie_word_embeddings=False,
                    rope_parameters=LLAMA3_ROPE,
                    **common,
                )
            )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).astype(np.int32)


def request(
    attempt: int,
    tokens: np.ndarray,
    *,
    group: str | None = None,
    seed: int = 0,
    generated: np.ndarray | None = None,
    logprobs: np.ndarray | None = None,
    stays: bool = False,
    **params,
) -> Request:
    more = {} if generated is None else {"generated": generated, "logprobs": logprobs}
    params.setdefault("max_tokens", 20)
    return Request(
        attempt=AttemptId(attempt),
        group=PromptId(group or f"g{attempt}"),
        prompt=tokens,
        params=SamplingParams(**params),
        seed=seed,
        stays=stays,
        **more,
    )


def drain(engine, steps: int = 10_000) -> dict[int, Output]:
    """Step until idle; outputs by attempt."""
    outputs: dict[int, Output] = {}
    while engine.busy() and steps:
        outputs |= {o.attempt: o for o in engine.step()}
        steps -= 1
    return outputs


def reference_logprobs(
    model, tokens: np.ndarray, response: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """The model's own log-probabilities of a response."""
    import torch

    ids = torch.from_numpy(np.concatenate([tokens, response]).astype(np.int64))[None]
    with torch.no_grad():
        logits = model(ids).logits[0, len(tokens) - 1 : -1].float() / temperature
    chosen = torch.from_numpy(response.astype(np.int64))[:, None]
    return logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()


def assert_new_weights(engine) -> None:
    """Twice new weights, in place: what is sampled has their log-probabilities."""
    import torch

    torch.manual_seed(1)
    for version in (1, 2):
        model = build("wide")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * version * torch.randn_like(parameter))
        engine.load_weights(list(model.named_parameters()), version)
        tokens = prompt(20, version)
        engine.submit([request(i, tokens, group="g", seed=i) for i in range(6)])
        for output in drain(engine).values():
            assert output.weights_version == version
            reference = reference_logprobs(model, tokens, output.tokens)
            np.testing.assert_allclose(output.logprobs, reference, atol=1e-4)
