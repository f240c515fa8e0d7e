"""vLLM's routers and the trainer's: what replaying their choices is worth in bfloat16."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from engine_models import VOCABULARY, drain, request
from family_cases import record
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollpacker.checkpoint_names import CheckpointNames, stored
from rollpacker.config import ModelConfig, TrainConfig, VllmEngineConfig
from rollpacker.core.types import Group, PromptId, Sample
from rollpacker.train.local import LocalTrainer
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward

pytestmark = pytest.mark.cluster

RESPONSES = 24
LAYERS = 6


@pytest.fixture(scope="module")
def model():
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


def _capture(worker, into):
    """Runs in vLLM's worker: its routers say what they choose."""
    for module in worker.get_model().modules():
        router = getattr(module, "router", None)
        if hasattr(router, "set_capture_fn"):
            router.set_capture_fn(lambda chosen: into.append(chosen.cpu().numpy().copy()))


def _folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def groups(model, tmp_path_factory):
    """Responses with vLLM's routes: sampled one at a time, each with a prompt of its own."""
    from rollpacker.engine.vllm import VllmEngine

    config = ModelConfig(path=_folder(model, tmp_path_factory), dtype="bfloat16")
    settings = VllmEngineConfig(max_running=1, kv_tokens=1024)
    engine = VllmEngine(config, config=settings, alone=False)
    engine.load_weights(CheckpointNames(model).converted(stored(model)), 0)
    chosen = []
    engine._engine.collective_rpc(_capture, args=(chosen,))
    found, rng = [], np.random.default_rng(0)
    for number in range(RESPONSES):
        chosen.clear()
        prompt = rng.integers(3, VOCABULARY, 12).astype(np.int32)
        engine.submit([request(number, prompt, seed=number, max_tokens=48, ignore_stop=True)])
        (output,) = drain(engine).values()
        steps = [np.stack(chosen[at : at + LAYERS], 1) for at in range(0, len(chosen), LAYERS)]
        routes = np.concatenate(steps).astype(np.int16)
        assert len(routes) == len(prompt) + len(output.tokens) - 1
        sample = Sample(
            prompt=PromptId(str(number)),
            index=0,
            attempt=output.attempt,
            prompt_tokens=prompt,
            tokens=output.tokens,
            logprobs=output.logprobs,
            finish_reason="length",
            weights_version=0,
            reward=1.0,
            routes=routes,
        )
        found.append(
            Group(prompt=sample.prompt, samples=(sample,), advantages=np.ones(1, np.float32))
        )
    engine.close()
    return found


def _outcome(model, groups, replay):
    config = TrainConfig(learning_rate=1e-4, router_replay=replay, packing="padded")
    trainer = LocalTrainer(copy.deepcopy(model), None, config, temperature=1.0)
    total = trainer.accumulate(groups)
    parameters = trainer._optimizer._parameters
    sizes = [parameter.numel() for parameter in parameters.values()]
    sums = dict(zip(parameters, trainer._optimizer.sums.split(sizes), strict=True))
    gradient = float(sums["model.layers.2.mlp.gate.weight"].norm())
    return trainer.apply(total).metrics, gradient


def test_replayed_routes_bring_the_trainer_closer(model, groups):
    items = packing.numbered((g.samples[0], 1.0) for g in groups)
    batch = packing.build(items, False, torch.device("cpu"))
    chosen: list[torch.Tensor] = []
    handles = record(model, chosen)
    with torch.no_grad():
        PackedForward(model).logprobs(batch, 1.0)
    for handle in handles:
        handle.remove()
    own = torch.stack(chosen, 1).sort(-1).values
    other = (own != batch.routes.sort(-1).values).any(-1)
    tokens, pairs = float(other.any(-1).float().mean()), float(other.float().mean())
    (free, gradient), (replayed, still) = (_outcome(model, groups, r) for r in (False, True))
    print(
        f"other experts: {pairs:.1%} of tokens and layers, {tokens:.1%} of tokens; "
        f"|d| {free['sampler/abs_logprob_difference']:.2e} -> "
        f"{replayed['sampler/abs_logprob_difference']:.2e}, k3 {free['sampler/k3']:.2e} -> "
        f"{replayed['sampler/k3']:.2e}, router's gradient {gradient:.3g}, {still:.3g}"
    )
    assert 0.001 < pairs < 0.2
    assert replayed["sampler/k3"] < 0.6 * free["sampler/k3"]
    assert still == pytest.approx(gradient, rel=0.2)


def test_an_engine_that_cannot_say_its_routes_says_so(model, tmp_path_factory):
    from rollpacker.engine.vllm import VllmEngine

    config = ModelConfig(path=_folder(model, tmp_path_factory), dtype="bfloat16")
    with pytest.raises(ValueError, match=r"with train\.router_replay cannot run .*: ") as caught:
        VllmEngine(config, config=VllmEngineConfig(kv_tokens=256), routes=True)
    assert "\n" not in str(caught.value)
