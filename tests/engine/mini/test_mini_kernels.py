"""The compiled kernels against what they are defined to compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_models import build, drain, prompt, request
from numba import njit

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.cpu.kernels import decode, encode


@njit
def compiled(values, stored, back):
    for i in range(len(values)):
        stored[i] = encode(stored, values[i])
        back[i] = decode(stored[i])


def floats() -> np.ndarray:
    """Of all magnitudes and signs, with ties between two bfloat16, zeros and infinities."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F7F_0000, 2000, dtype=np.uint32)
    bits[:500] = bits[:500] & 0xFFFF_0000 | 0x8000
    found = bits.view(np.float32) * rng.choice([-1, 1], 2000).astype(np.float32)
    return np.concatenate([found, np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_elements_round_as_in_torch(dtype):
    values = floats()
    rounded = torch.from_numpy(values).to(dtype)
    expected = rounded.numpy() if dtype == torch.float32 else rounded.view(torch.uint16).numpy()
    stored, back = np.empty_like(expected), np.empty_like(values)
    compiled(values, stored, back)
    assert stored.tobytes() == expected.tobytes()
    assert back.tobytes() == rounded.float().numpy().tobytes()
    plain = np.array([encode(stored, value) for value in values])
    assert plain.tobytes() == expected.tobytes()
    assert np.array([decode(e) for e in plain]).tobytes() == back.tobytes()


@pytest.mark.parametrize("max_running", [1, 5, 16])
def test_bfloat16_results_do_not_depend_on_the_batch(max_running):
    engine = MiniEngine(
        build("qwen3", share=3).bfloat16(),
        config=MiniEngineConfig(max_running=max_running, kv_tokens=640),
    )
    requests = [
        request(i, prompt(3 + 9 * (i % 4), i % 4), group=str(i % 4), seed=i, ignore_stop=True)
        for i in range(16)
    ]
    engine.submit(requests)
    together = drain(engine)
    for each in requests:
        engine.submit([each])
        alone = drain(engine)[each.attempt]
        assert alone.tokens.tobytes() == together[each.attempt].tokens.tobytes()
        assert alone.logprobs.tobytes() == together[each.attempt].logprobs.tobytes()
