"""The engine samples from the trainer's weights, whichever way they change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_models import build, drain, prompt, reference_logprobs, request

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.train.model.adapters import bare_copy, merged_weights

CONFIG = MiniEngineConfig(max_running=4, kv_tokens=512)
TOKENS = prompt(12)


def sample(engine: MiniEngine):
    engine.submit([request(0, TOKENS, seed=1)])
    return drain(engine)[0]


def assert_current(engine: MiniEngine, model) -> None:
    output = sample(engine)
    reference = reference_logprobs(model, TOKENS, output.tokens)
    np.testing.assert_allclose(output.logprobs, reference, atol=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_optimizer_updates_are_seen_at_once(kind):
    model = build(kind)
    engine = MiniEngine(model, config=CONFIG)
    before = sample(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        ids = torch.from_numpy(TOKENS.astype(np.int64))[None]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_current(engine, model)
    assert sample(engine).tokens.tolist() != before.tokens.tolist()


def test_load_weights_takes_up_what_counters_miss():
    model = build("qwen2")
    engine = MiniEngine(model, config=CONFIG)
    for parameter in model.parameters():
        parameter.data.mul_(1.1)
    engine.load_weights(None, 1)
    assert_current(engine, model)


def test_load_weights_copies_by_name():
    model, other = build("qwen2"), build("qwen2")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    engine = MiniEngine(model, config=CONFIG)
    engine.load_weights(other.state_dict().items(), 3)
    output = sample(engine)
    assert output.weights_version == 3
    reference = reference_logprobs(other, TOKENS, output.tokens)
    np.testing.assert_allclose(output.logprobs, reference, atol=1e-4)
    assert torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_wrong_names_are_refused():
    model = build("qwen3")
    engine = MiniEngine(model, config=CONFIG)
    with pytest.raises(ValueError, match="which the model lacks"):
        engine.load_weights([("nonsense", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match="missing in all"):
        engine.load_weights(list(model.state_dict().items())[:3], 1)


def test_the_model_stays_a_checkpoint(tmp_path):
    model = build("qwen2")
    names = {n: p.data_ptr() for n, p in model.named_parameters()}
    sample(MiniEngine(model, config=CONFIG))
    assert names == {n: p.data_ptr() for n, p in model.named_parameters()}
    model.save_pretrained(tmp_path)
    assert_current(MiniEngine(type(model).from_pretrained(tmp_path), config=CONFIG), model)


def test_lora_adapters_are_added():
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        build("qwen2"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    )
    engine = MiniEngine(bare_copy(wrapped.get_base_model()), config=CONFIG)
    before = sample(engine)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    engine.load_weights(merged_weights(wrapped.get_base_model()), 1)
    assert_current(engine, wrapped)
    assert sample(engine).tokens.tolist() != before.tokens.tolist()


@pytest.mark.parametrize("where", [{"target_modules": ["v_proj"]}, {"modules_to_save": ["norm"]}])
def test_adapters_in_the_model_itself_are_refused(where):
    """Its kernels read plain weights; those below an adapter are not what is trained."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, **({"target_modules": ["lm_head"]} | where))
    wrapped = peft.get_peft_model(build("qwen3"), config)
    with pytest.raises(ValueError, match="decodes from plain weights, and this model has adapters"):
        MiniEngine(wrapped.get_base_model(), config=CONFIG)
