"""On a GPU: the same updates as on a CPU, and a sampler and a trainer that agree."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, MAX_LENGTH, VOCABULARY, clone, group_batch, make_model

from rollpacker.config import GRPOConfig, MiniEngineConfig, TrainConfig
from rollpacker.core.types import AttemptId, Group, PromptId, Sample
from rollpacker.engine.base import Request, SamplingParams
from rollpacker.engine.mini import MiniEngine
from rollpacker.train.trainer import Trainer

pytestmark = pytest.mark.gpu


def trainer(model, tokenizer, **settings):
    config = TrainConfig(learning_rate=1e-3, micro_batch_tokens=100, **settings)
    return Trainer(model, tokenizer, config, temperature=1.0, max_length=MAX_LENGTH)


def step(trained, groups):
    """The gradient of the groups, on the CPU, and what came of the update."""
    partial = trained.accumulate(groups)
    gradient = trained._optimizer.sums.cpu().clone()
    return gradient, trained.apply(partial)


@pytest.mark.parametrize("packing", ["padded", "prompt_shared"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_is_that_of_the_cpu(family, packing, tokenizer):
    model = make_model(family)
    groups = group_batch(model, GRPOConfig(), off=0.2)
    here = trainer(clone(model), tokenizer, packing=packing)
    there = trainer(clone(model).to("cuda"), tokenizer, packing=packing)
    (expected, one), (found, two) = step(here, groups), step(there, groups)
    assert there.device.type == "cuda"
    assert (found - expected).norm() / expected.norm() < 1e-4
    assert one.applied
    assert two.applied
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert two.metrics == pytest.approx(one.metrics, rel=1e-3, abs=1e-4)


def test_what_went_to_host_memory_and_back_is_the_same(tokenizer):
    model = make_model().to("cuda")
    trained = trainer(model, tokenizer)
    groups = group_batch(make_model(), GRPOConfig())
    step(trained, groups)
    before = {name: weight.clone().cpu() for name, weight in trained.weights()}
    trained.warm.offload()
    assert all(p.untyped_storage().nbytes() == 0 for p in model.parameters())
    trained.warm.load()
    after = dict(trained.weights())
    assert all(torch.equal(after[name].cpu(), weight) for name, weight in before.items())
    assert step(trained, groups)[1].applied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_agrees_with_the_trainer(dtype, tokenizer):
    model = make_model().to("cuda", dtype)
    engine = MiniEngine(model, config=MiniEngineConfig(max_running=8, kv_tokens=1024))
    prompt = np.arange(2, 9, dtype=np.int32)
    params = SamplingParams(max_tokens=30, ignore_stop=True)
    ids = [AttemptId(i) for i in range(8)]
    engine.submit(
        [Request(attempt=i, group=PromptId("p"), prompt=prompt, params=params, seed=i) for i in ids]
    )
    outputs = []
    while engine.busy():
        outputs += engine.step()
    samples = tuple(
        Sample(
            prompt=PromptId("p"),
            index=int(o.attempt),
            attempt=o.attempt,
            prompt_tokens=prompt,
            tokens=o.tokens,
            logprobs=o.logprobs,
            finish_reason="length",
            weights_version=0,
            reward=float(o.attempt),
        )
        for o in outputs
    )
    group = Group(prompt=PromptId("p"), samples=samples, advantages=np.linspace(-1.0, 1.0, 8))
    scores = trainer(model, tokenizer).score([group])
    apart = [np.abs(scores[(s.prompt, s.index)] - s.logprobs) for s in samples]
    assert len(np.concatenate(apart)) == 240
    assert np.concatenate(apart).mean() < {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert max(int(s.tokens.max()) for s in samples) < VOCABULARY
