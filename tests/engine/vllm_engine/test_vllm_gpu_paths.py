"""What only GPUs reach, on the CPU build: MLA's weights, logits in bfloat16, drafts on trial."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from engine_models import build, drain
from families import make as make_family
from scripted_drafts import Scripted, alone_in_group, ask

from rollpacker.checkpoint_names import CheckpointNames, stored
from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.engine.base import Speculation
from rollpacker.engine.sampling.rows import draw_by_torch

pytestmark = pytest.mark.cluster

EACH = [alone_in_group(ask(n, top_p=1.0, top_k=0)) for n in range(64)]


@pytest.fixture
def make(folder):
    from rollpacker.engine.vllm import VllmEngine

    def make(drafter=None, dtype="float32", **parts):
        config = VllmEngineConfig(max_running=64, kv_tokens=64 * 256)
        model = ModelConfig(path=str(folder), dtype=dtype)
        engine = VllmEngine(model, config=config, drafter=drafter, **parts)
        own = build("wide").to(torch.bfloat16 if dtype == "bfloat16" else torch.float32)
        engine.load_weights([*own.named_parameters()], 0)
        return engine

    return make


def test_flashinfers_sampler_which_nvcc_compiles_is_not_asked_for():
    import rollpacker.engine.vllm  # noqa: F401

    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_a_reload_of_latent_attention_is_no_old_weight(tmp_path, monkeypatch):
    """vLLM derives W_UV and W_UK_T as it loads: no checkpoint has them."""
    from rollpacker.engine.vllm import VllmEngine

    monkeypatch.setattr(VllmEngine, "_try", lambda self: None)  # a CPU has no such attention
    # On a processor with AMX, vLLM packs these weights in a way that no GPU does.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model = make_family("deepseek_v2", 1).to(torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    config = VllmEngineConfig(max_running=4, kv_tokens=1024)
    engine = VllmEngine(ModelConfig(path=str(tmp_path), dtype="bfloat16"), config=config)
    names = CheckpointNames(model)
    for version in range(2):
        engine.load_weights(names.converted(stored(model)), version)


def test_drafts_over_torch_and_bfloat16_change_nothing(make, monkeypatch):
    monkeypatch.setattr("rollpacker.engine.vllm.drawing.draw_rows", draw_by_torch)
    plain_engine = make(dtype="bfloat16")
    plain_engine.submit(EACH)
    plain = drain(plain_engine)
    texts = {r.attempt: np.concatenate([r.prompt, plain[r.attempt].tokens]) for r in EACH}
    engine = make(Scripted(texts, "random"), dtype="bfloat16")
    engine.speculate(Speculation(below=64, most=8))
    engine.submit(EACH)
    drafted = drain(engine)
    assert sum(output.drafts.accepted for output in drafted.values()) > 64
    for attempt, output in drafted.items():
        assert output.tokens.tobytes() == plain[attempt].tokens.tobytes()
        np.testing.assert_allclose(output.logprobs, plain[attempt].logprobs, atol=1e-4)


def test_log_probabilities_of_bfloat16_logits_are_those_of_float32():
    from rollpacker.engine.sampling.race import RowDraws

    torch.manual_seed(0)
    logits = (torch.randn(64, 151_936) * 2.5 + 4).bfloat16()
    draws = RowDraws(
        temperature=np.ones(64, np.float32),
        top_k=np.zeros(64, np.int32),
        top_p=np.ones(64, np.float32),
        uniform=np.random.default_rng(0).random(64),
    )
    tokens, logprobs = draw_by_torch(logits, draws)
    true = torch.log_softmax(logits.float(), -1).gather(1, tokens[:, None])[:, 0]
    assert float((logprobs - true).abs().max()) < 1e-4


def test_a_draft_fills_no_step_beyond_a_gpus_graphs(make):
    engine = make()
    engine._scheduler.vllm_config.compilation_config.max_cudagraph_capture_size = 24
    engine.submit(EACH[:16])
    plain = drain(engine)
    engine.load_weights(None, 1)
    engine.speculate(Speculation(below=16, most=16))
    texts = {r.attempt: np.concatenate([r.prompt, plain[r.attempt].tokens]) for r in EACH[:16]}
    engine._ahead._drafter = Scripted(texts, "right")
    most, schedule = [], engine._scheduler.schedule

    def scheduled(*given):
        out = schedule(*given)
        if out.scheduled_spec_decode_tokens:
            most.append(out.total_num_scheduled_tokens)
        return out

    engine._scheduler.schedule = scheduled
    engine.submit(EACH[:16])
    drain(engine)
    assert most
    assert max(most) <= 24


def test_drafts_that_change_a_response_are_left_off(make, monkeypatch):
    notes: list[str] = []
    engine = make(proves=True, note=notes.append)
    assert engine._ahead is not None
    assert not notes
    # A verification that takes a whole draft, whatever it says.
    monkeypatch.setattr(
        "rollpacker.engine.vllm.first_runner.keep",
        lambda row, drawn, draft: (
            row.drawn.__setitem__(
                slice(None), [(token, drawn[n][1]) for n, token in enumerate(draft)] or drawn
            )
            or row.drawn
        ),
    )
    wrong = make(proves=True, note=notes.append)
    assert wrong._ahead is None
    assert "decoding ahead stays off" in notes[0]
    wrong.speculate(Speculation(below=64, most=8))
    wrong.submit(EACH[:4])
    assert len(drain(wrong)) == 4


def test_drafts_that_fail_are_left_off(make, monkeypatch):
    notes: list[str] = []

    def fail(*_given):
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr("rollpacker.engine.vllm.first_runner.keep", fail)
    engine = make(proves=True, note=notes.append)
    assert engine._ahead is None
    assert "misaligned address" in notes[0]


def test_an_engine_that_does_not_start_with_drafts_starts_without(make, monkeypatch):
    from rollpacker.engine.vllm import engine as module

    notes: list[str] = []
    build_it = module.build

    def build(*given, verifies, **more):
        if verifies:
            raise ValueError("no such proposer")
        return build_it(*given, verifies=False, **more)

    monkeypatch.setattr(module, "build", build)
    engine = make(proves=True, note=notes.append)
    assert "no such proposer" in notes[0]
    engine.submit(EACH[:4])
    assert len(drain(engine)) == 4
    with pytest.raises(ValueError, match="no such proposer"):
        make()


def answered(engine):
    engine.submit(EACH[:4])
    return drain(engine)


@pytest.mark.parametrize("loses", [True, False])
def test_a_sleep_that_loses_a_tensor_is_replaced(make, monkeypatch, loses):
    """A CPU build does not sleep: a stand-in scales an embedding table that no weight replaces."""
    from rollpacker.engine.vllm import VllmEngine

    levels: list[int] = []

    def slept(model):
        (rotary,) = {m.cos_sin_cache for m in model.modules() if hasattr(m, "cos_sin_cache")}
        rotary.mul_(0.5)

    def sleep(self):
        self._remove([*self._rows.values()], "abort")
        self._drop_prefixes()
        self._bare = True
        levels.append(self._sleeps)
        if loses and self._sleeps == 2:
            self._engine.apply_model(slept)

    begin = VllmEngine._begin

    def able(self, verifies):
        begin(self, verifies)
        self._engine.model_config.enable_sleep_mode = True

    plain = answered(make(proves=False))
    monkeypatch.setattr(VllmEngine, "_begin", able)
    monkeypatch.setattr(VllmEngine, "sleep", sleep)
    monkeypatch.setattr(VllmEngine, "wake", lambda _self: None)
    notes: list[str] = []
    engine = make(proves=True, note=notes.append)
    for attempt, output in answered(engine).items():
        assert output.tokens.tobytes() == plain[attempt].tokens.tobytes()
    engine.sleep()
    assert levels == ([2, 1] if loses else [2, 2])
    assert [("copy of the weights" in note) for note in notes] == [True] * loses
