"""Cost formulas against figures worked out by hand and known sizes."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.sim.costs.costs import (
    CurveCosts,
    GpuCosts,
    RewardCosts,
    TrainCosts,
    packing_bound_s,
    single_sequence_s,
)
from rollpacker.sim.costs.hardware import DEVICES, MeasuredDevice, find_device
from rollpacker.sim.costs.models import MODELS, ModelShape, find_model
from rollpacker.sim.workload.workload import SimulatedRequest
from rollpacker.sim.world.decoder import Decoder

H800 = DEVICES["H800"]
CPU = MeasuredDevice(
    latency={1: 1e-3, 4: 2e-3, 16: 5e-3}, kv_tokens=10_000, prefill_token_s=1e-5, context=64
)


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("Qwen2.5-7B", 7_615_616_512, 57_344),
        ("Qwen2.5-14B", 14_770_033_664, 196_608),
        ("Qwen2.5-32B", 32_763_876_352, 262_144),
        ("Qwen2.5-0.5B", 494_032_768, 12_288),
        ("Qwen2.5-1.5B", 1_543_714_304, 28_672),
        ("Qwen2.5-3B", 3_085_938_688, 36_864),
        ("Qwen2.5-72B", 72_706_203_648, 327_680),
        ("Qwen3-0.6B", 596_049_920, 114_688),
        ("Qwen3-1.7B", 1_720_574_976, 114_688),
        ("Qwen3-4B", 4_022_468_096, 147_456),
        ("Qwen3-8B", 8_190_735_360, 147_456),
        ("Qwen3-14B", 14_768_307_200, 163_840),
        ("Qwen3-32B", 32_762_123_264, 262_144),
        ("Llama-3.2-1B", 1_235_814_400, 32_768),
        ("Llama-3.2-3B", 3_212_749_824, 114_688),
        ("Llama-3.1-8B", 8_030_261_248, 131_072),
        ("Llama-3.1-70B", 70_553_706_496, 327_680),
    ],
)
def test_known_models_have_their_published_sizes(name: str, parameters: int, kv_bytes: int) -> None:
    assert MODELS[name].parameters == parameters
    assert MODELS[name].kv_bytes == kv_bytes


QWEN_05B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}


def test_a_config_json_is_read_with_tied_embeddings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_05B))
    shape = find_model(str(tmp_path))
    assert shape.parameters == 494_032_768
    assert shape == find_model(str(tmp_path / "config.json"))
    assert (shape.blocks[0].kv_width, shape.kv_heads) == (2 * 64, 2)


@pytest.mark.parametrize(
    "config",
    [
        QWEN_05B,
        QWEN_05B | {"tie_word_embeddings": False},
        QWEN_05B | {"model_type": "qwen3", "head_dim": 96},
        QWEN_05B | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    ],
)
def test_counts_equal_those_of_transformers(config: dict[str, object]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    fields = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config["model_type"], **fields)
        )
    counted = sum(weight.numel() for weight in model.parameters())
    assert ModelShape.from_config(config, "it").parameters == counted


def test_names_are_found_without_organisation_and_suffix() -> None:
    assert find_model("Qwen/Qwen2.5-7B-Instruct") is MODELS["Qwen2.5-7B"]


def test_bad_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown model 'gpt-5'.*Qwen2\.5-7B"):
        find_model("gpt-5")
    near = {"llama3-8b": "Llama-3-8B", "meta-llama/Llama3-8B-Instruct": "Llama-3-8B"}
    for name, meant in (near | {"deepseekr1": "DeepSeek-R1"}).items():
        with pytest.raises(ValueError, match=rf"'{name}': did you mean {meant}\? Otherwise give"):
            find_model(name)
    with pytest.raises(ValueError, match="it: no integer num_experts_per_tok in its config"):
        ModelShape.from_config(QWEN_05B | {"model_type": "qwen3_moe", "num_experts": 8}, "it")
    with pytest.raises(ValueError, match="model_type 'rwkv' is not one of those whose size"):
        ModelShape.from_config(QWEN_05B | {"model_type": "rwkv"}, "it")
    with pytest.raises(ValueError, match="vocab_size"):
        ModelShape.from_config({k: v for k, v in QWEN_05B.items() if k != "vocab_size"}, "it")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"config\.json: cannot be read as JSON"):
        find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "known", "memory"),
    [
        ("h800", "H800", 80),
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("A100-SXM4-80GB", "A100", 80),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB", 40),
        ("NVIDIA GeForce RTX 4090", "RTX4090", 24),
        ("4090", "RTX4090", 24),
        ("rtx-3090", "RTX3090", 24),
        ("L4", "L4", 24),
        ("NVIDIA A10", "A10", 24),
        ("a10g", "A10G", 24),
        ("RTX A6000", "A6000", 48),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000", 96),
        ("Tesla T4", "T4", 16),
    ],
)
def test_devices_are_found_as_people_and_drivers_write_them(
    name: str, known: str, memory: int
) -> None:
    assert find_device(name) is DEVICES[known]
    assert DEVICES[known].memory == memory * 1e9


def test_devices_that_are_not_known_are_named() -> None:
    assert all(find_device(name) is device for name, device in DEVICES.items())
    for name in ("V100", "A1", "", "NVIDIA"):
        with pytest.raises(ValueError, match=f"unknown device '{name}'"):
            find_device(name)


def test_a_decode_step_by_hand() -> None:
    shape = MODELS["Qwen2.5-14B"]
    costs = GpuCosts(device=H800, shape=shape, tp=4, kappa=0.5)
    weights = 2 * shape.parameters / (4 * 3.35e12 * 0.92)
    reduced = 2 * 48 * 5120 * 2 * 2 * 3 / (4 * 160e9)
    fixed = 4.5e-3 + 50e-6 * 48 + weights + 10 * (60e-6 + reduced)
    reading = 5000 * 196608 / (4 * 3.35e12 * 0.75)
    assert costs.step_s(10, 5000) == pytest.approx(0.5 * (fixed + reading), rel=1e-12)
    assert costs.slope == pytest.approx(0.5 * reading / 5000, rel=1e-12)
    assert costs.capacity == pytest.approx((4 * (80e9 * 0.85 - 4e9) - 29540067328) / 196608)
    assert costs.prefill_s(100) == pytest.approx(100 * 29540067328 / (4 * 990e12 * 0.5))


def test_large_batches_are_bound_by_compute() -> None:
    costs = GpuCosts(device=H800, shape=MODELS["Qwen2.5-7B"])
    more = costs.step_s(2001, 0) - costs.step_s(2000, 0)
    assert more == pytest.approx(60e-6 + 2 * 7615616512 / (990e12 * 0.6), rel=1e-6)
    assert costs.step_s(2, 0) - costs.step_s(1, 0) == pytest.approx(60e-6, rel=1e-6)


def test_more_shards_than_kv_heads_do_not_read_faster() -> None:
    shape = ModelShape.from_config(QWEN_05B | {"num_attention_heads": 16}, "it")
    two, four = (GpuCosts(device=H800, shape=shape, tp=tp) for tp in (2, 4))
    assert two.slope == four.slope


@pytest.mark.parametrize(
    ("model", "kappa", "cap", "seconds"),
    [("Qwen2.5-14B", 1.0, 16384, 135), ("Qwen2.5-32B", 0.8, 32768, 279)],
)
def test_the_single_sequence_bounds(model: str, kappa: float, cap: int, seconds: float) -> None:
    costs = GpuCosts(device=H800, shape=MODELS[model], tp=8, kappa=kappa)
    assert single_sequence_s(costs, cap) == pytest.approx(seconds, abs=0.6)


def test_impossible_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tp=1: Qwen.*with 40 heads, runs on 2, 4, 8 x H800"):
        GpuCosts(device=H800, shape=MODELS["Qwen2.5-32B"])
    with pytest.raises(ValueError, match="28 heads"):
        GpuCosts(device=H800, shape=MODELS["Qwen2.5-7B"], tp=8)


def test_a_measured_curve_is_met_at_its_points() -> None:
    costs = CurveCosts(CPU)
    for batch, seconds in CPU.latency.items():
        assert costs.step_s(batch, batch * 64) == pytest.approx(seconds)
    assert costs.capacity == 10_000
    assert costs.slope == 0.0


def test_a_context_slope_turns_the_curve_about_its_measured_context() -> None:
    device = MeasuredDevice(
        latency=CPU.latency, kv_tokens=9, prefill_token_s=0.0, context=64, context_token_s=1e-6
    )
    costs = CurveCosts(device)
    assert costs.step_s(4, 4 * 64 + 100) == pytest.approx(2e-3 + 1e-4)
    too_steep = MeasuredDevice(
        latency=CPU.latency, kv_tokens=9, prefill_token_s=0.0, context=64, context_token_s=1e-3
    )
    with pytest.raises(ValueError, match="lower context_token_s"):
        CurveCosts(too_steep)


def test_training_of_one_response() -> None:
    costs = TrainCosts.on_gpus(H800, MODELS["Qwen2.5-7B"], gpus=2, launch_s=0.03, mfu=0.25)
    one = 0.03 + 12 * 7615616512 * 1000 / (2 * 990e12 * 0.25)
    assert costs.sequence_s(800) == pytest.approx(one)


def test_rewards() -> None:
    costs = RewardCosts()
    assert costs.judged_s(1.0) == 30.0
    assert costs.judged_s(0.0) == 7.5


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 64))
def test_no_decoder_beats_the_packing_bound(lengths: list[int], max_running: int) -> None:
    for costs in (CurveCosts(CPU), GpuCosts(device=H800, shape=MODELS["Qwen2.5-14B"])):
        decoder = Decoder(costs, max_running=max_running)
        for attempt, tokens in enumerate(lengths):
            decoder.submit(0.0, SimulatedRequest(attempt, "g", 20, tokens))
        now, at = 0.0, decoder.next_event(0.0)
        while at is not None:
            now = at
            decoder.advance(now)
            at = decoder.next_event(now)
        bound = packing_bound_s(costs, 1, lengths, 20, max_running)
        assert now >= bound * (1 - 1e-9)
        assert now >= single_sequence_s(costs, max(lengths), 20) * (1 - 1e-9)


def test_packing_an_empty_round_takes_no_time() -> None:
    assert packing_bound_s(CurveCosts(CPU), 2, []) == 0.0
    assert math.isclose(packing_bound_s(CurveCosts(CPU), 2, [100], 20, 1), 0.05)
