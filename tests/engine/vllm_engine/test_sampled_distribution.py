"""What engines sample is what the model says, over many tokens."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from engine_models import build, drain, prompt, request
from vllm_pair import Pair

from rollpacker.config import MiniEngineConfig, ModelConfig, VllmEngineConfig

RESPONSES, LENGTH = 200, 100


def mini(_folder):
    from rollpacker.engine.mini import MiniEngine

    yield MiniEngine(build("wide"), config=MiniEngineConfig(max_running=64))


def vllm(folder):
    from rollpacker.engine.vllm import VllmEngine

    config = VllmEngineConfig(max_running=64, kv_tokens=64 * 128)
    engine = VllmEngine(ModelConfig(path=str(folder)), config=config)
    yield engine
    engine.close()


def vllm_tp2(folder):
    pair = Pair()
    yield pair.build(folder, max_running=64, kv_tokens=32 * 128)
    pair.close()


@pytest.fixture(
    params=[
        mini,
        pytest.param(vllm, marks=pytest.mark.cluster),
        pytest.param(vllm_tp2, marks=pytest.mark.cluster),
    ],
    ids=["mini", "vllm", "vllm-tp2"],
)
def engine(request, tmp_path):
    model = build("wide")
    model.config.save_pretrained(tmp_path)
    made = contextmanager(request.param)
    with made(tmp_path) as engine:
        if request.param is not mini:
            engine.load_weights(list(model.named_parameters()), 0)
        yield engine


def test_surprise_is_the_entropy(engine):
    """-log p of what was sampled is, on average, the entropy: |z| below 5 over 20,000 tokens.

    A sampler that is wrong where its log-probabilities are right is found by nothing else.
    """
    model = build("wide")
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
