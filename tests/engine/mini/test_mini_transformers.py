"""The built-in engine against transformers on the same weights."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from engine_models import build, drain, prompt, reference_logprobs, request

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.runner import shape_of
from rollpacker.engine.mini.torch_runner import TorchRunner


def make(kind: str, path: str, config: MiniEngineConfig, share: int = 2):
    model = build(kind, share)
    if path == "numba":
        return model, MiniEngine(model, config=config)
    runner = TorchRunner(
        model, shape_of(model), block_size=8, deterministic=path == "deterministic"
    )
    return model, MiniEngine(model, config=config, runner=runner)


PROMPTS = [prompt(n, n) for n in (1, 15, 16, 17, 33)]
TOKENS = 24
"""Of a greedy response: every sequence grows into another block."""


@cache
def greedy(kind: str, share: int):
    """Greedy responses of transformers to the prompts, with their log-probabilities."""
    model = build(kind, share)
    found = []
    for tokens in PROMPTS:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        response = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(tokens) :].numpy()
        found.append((response, reference_logprobs(model, tokens, response)))
    return found


@pytest.mark.parametrize(
    ("path", "kv_tokens"),
    [("numba", 4096), ("numba", 176), ("torch", 4096), ("torch", 176), ("deterministic", 4096)],
)
@pytest.mark.parametrize("share", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_greedy_tokens_and_logprobs_equal_transformers(kind, share, path, kv_tokens):
    _, engine = make(kind, path, MiniEngineConfig(max_running=6, kv_tokens=kv_tokens), share)
    engine.submit(
        [
            request(i, PROMPTS[i % 5], group=str(i % 5), temperature=0, max_tokens=TOKENS)
            for i in range(10)
        ]
    )
    outputs = drain(engine)
    assert (engine.stats().preemptions > 0) == (kv_tokens < 1000)
    for i, (tokens, logprobs) in enumerate(greedy(kind, share)):
        for output in (outputs[i], outputs[i + 5]):
            assert output.tokens.tolist() == tokens.tolist()
            np.testing.assert_allclose(output.logprobs, logprobs, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("path", ["numba", "torch"])
def test_sampled_logprobs_are_the_models(path, temperature):
    model, engine = make("qwen3", path, MiniEngineConfig(max_running=8, kv_tokens=2048))
    tokens = prompt(20)
    engine.submit(
        [request(i, tokens, group="g", seed=i, temperature=temperature) for i in range(6)]
    )
    for output in drain(engine).values():
        reference = reference_logprobs(model, tokens, output.tokens, temperature)
        np.testing.assert_allclose(output.logprobs, reference, atol=1e-4)


def test_bfloat16_is_close_to_the_float32_model():
    model = build("qwen2", share=3).bfloat16()
    engine = MiniEngine(model, config=MiniEngineConfig(max_running=8, kv_tokens=2048))
    tokens = prompt(20)
    engine.submit([request(i, tokens, group="g", seed=i, max_tokens=60) for i in range(6)])
    exact = model.float()
    for output in drain(engine).values():
        reference = reference_logprobs(exact, tokens, output.tokens)
        assert np.abs(output.logprobs - reference).mean() < 0.03


def test_long_prompts_run_in_pieces():
    model = build("qwen2")
    model.config.max_position_embeddings = 1500
    engine = MiniEngine(model, config=MiniEngineConfig(max_running=4, kv_tokens=6000))
    tokens = prompt(1300)
    engine.submit([request(i, tokens, group="g", seed=i) for i in range(3)])
    for output in drain(engine).values():
        reference = reference_logprobs(model, tokens, output.tokens)
        np.testing.assert_allclose(output.logprobs, reference, atol=1e-4)


def test_other_architectures_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    other = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(ValueError, match=r"not 'gpt2': engine\.kind=vllm may run it"):
        MiniEngine(other, config=MiniEngineConfig())  # pyright: ignore[reportArgumentType]
    sliding = Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            vocab_size=50,
            use_sliding_window=True,
            sliding_window=8,
            max_window_layers=1,
        )
    )
    with pytest.raises(ValueError, match=r"sliding-window attention: engine\.kind=vllm"):
        MiniEngine(sliding, config=MiniEngineConfig())
