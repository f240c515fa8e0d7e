"""What engines sample is what the model says, over many tokens."""

import numpy as np
import pytest
import torch
from engine_models import build, drain, prompt, request
from test_engine_contract import vllm

from rollpacker.config import MiniEngineConfig

RESPONSES, LENGTH = 200, 100


def mini():
    from rollpacker.engine.mini import MiniEngine

    return MiniEngine(build("wide"), config=MiniEngineConfig(max_running=64))


@pytest.mark.parametrize(
    "make", [mini, pytest.param(vllm, marks=pytest.mark.cluster)], ids=["mini", "vllm"]
)
def test_surprise_is_the_entropy(make):
    """-log p of what was sampled is, on average, the entropy: |z| below 5 over 20,000 tokens.

    A sampler that is wrong where its log-probabilities are right is found by nothing else.
    """
    engine, model = make(), build("wide")
    prompts = [prompt(8, i) for i in range(RESPONSES)]
    engine.submit(
        [
            request(i, tokens, seed=i, max_tokens=LENGTH, ignore_stop=True)
            for i, tokens in enumerate(prompts)
        ]
    )
    outputs = drain(engine)
    excess = variance = 0.0
    for i, tokens in enumerate(prompts):
        ids = torch.from_numpy(np.concatenate([tokens, outputs[i].tokens]).astype(np.int64))[None]
        with torch.no_grad():
            every = model(ids).logits[0, len(tokens) - 1 : -1].double().log_softmax(-1)
        chosen = every.gather(1, ids[0, len(tokens) :, None])[:, 0]
        np.testing.assert_allclose(outputs[i].logprobs, chosen.numpy(), atol=1e-4)
        entropy = -(every.exp() * every).sum(-1)
        excess += float((-chosen - entropy).sum())
        variance += float(((every.exp() * every**2).sum(-1) - entropy**2).sum())
    assert abs(excess) / variance**0.5 < 5
