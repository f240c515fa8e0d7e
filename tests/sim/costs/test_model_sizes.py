"""Sizes of every kind of model: published ones, those that transformers counts, what is cached."""

from __future__ import annotations

from typing import Any

import pytest

from rollpacker.sim.costs.costs import BLOCK_SLACK, GpuCosts, TrainCosts
from rollpacker.sim.costs.hardware import DEVICES
from rollpacker.sim.costs.layers_of_config import FAMILIES
from rollpacker.sim.costs.models import CONFIGS, FROZEN, MODELS, ModelShape, WeightCount, find_model

H100 = DEVICES["H100"]


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-30B-A3B", 30.5, 3.3),
        ("Qwen3-235B-A22B", 235, 22),
        ("Mixtral-8x7B", 46.7, 12.9),
        ("DeepSeek-V3", 671, 37),
        ("Gemma-3-1B", 1.0, 1.0),
        ("Gemma-3-4B", 3.88, 3.88),  # its text model, as all of these
        ("Gemma-3-12B", 11.8, 11.8),
        ("Gemma-3-27B", 27.0, 27.0),
    ],
)
def test_published_sizes(name: str, total: float, active: float) -> None:
    shape = MODELS[name]
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert shape.active / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "total", "active"), [("gpt-oss-20b", 20.91, 3.61), ("gpt-oss-120b", 116.83, 5.13)]
)
def test_published_sizes_that_leave_the_embedding_out(
    name: str, total: float, active: float
) -> None:
    """OpenAI counts the head as active and the embedding not."""
    shape = MODELS[name]
    assert shape.parameters / 1e9 == pytest.approx(total, rel=0.02)
    assert (shape.active - shape.embedding) / 1e9 == pytest.approx(active, rel=0.02)


def test_published_sizes_that_leave_both_embeddings_out() -> None:
    """80B and 3B, of which its card says "79B non-embedding"; to the digits that it gives."""
    shape = MODELS["Qwen3-Next-80B-A3B"]
    assert shape.parameters / 1e9 == pytest.approx(80, rel=0.02)
    assert (shape.parameters - shape.ends) / 1e9 == pytest.approx(79, rel=0.01)
    assert round((shape.active - shape.ends) / 1e9) == 3


def counted(config: Any) -> int:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_family_has_the_weights_that_transformers_builds(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    shape = ModelShape.from_config(config.to_dict(), kind)
    assert shape.parameters == pytest.approx(counted(config), rel=1e-3)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith("Llama")])
def test_known_models_have_the_weights_that_transformers_builds(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = dict(CONFIGS[name])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    assert MODELS[name].parameters == pytest.approx(counted(config), rel=1e-3)
    # The same by what transformers makes of them.
    again = ModelShape.from_config(config.to_dict(), name)
    assert again.blocks == MODELS[name].blocks


def test_a_composed_model_is_its_text_model() -> None:
    """As the hub's file of Gemma 3 12B is: what it leaves out is transformers' default."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    }
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    shape = ModelShape.from_config(whole, "it")
    known = MODELS["Gemma-3-12B"]
    assert (shape.kind, shape.count, shape.blocks) == ("gemma3_text", known.count, known.blocks)
    assert shape.tied
    # Of vision only the model itself says how much there is.
    assert (shape.frozen, known.frozen) == (None, 421_290_864)
    assert known.held == known.parameters + 421_290_864
    assert MODELS["Qwen3-8B"].held == MODELS["Qwen3-8B"].parameters


@pytest.mark.parametrize("name", FROZEN)
def test_known_models_have_the_vision_that_transformers_builds(name: str) -> None:
    """SigLIP's 27 layers, as the hub's files have them."""
    transformers = pytest.importorskip("transformers")
    vision = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    make = transformers.AutoConfig.for_model
    config = make("gemma3", text_config=dict(CONFIGS[name]), vision_config=vision)
    assert counted(config) - counted(config.get_text_config()) == MODELS[name].frozen


def test_windows_end_what_is_cached() -> None:
    """Gemma 3 12B: 8 of 48 layers keep all tokens, 40 the last 1,024; 8 heads of 256, twice."""
    shape, width = MODELS["Gemma-3-12B"], 8 * 256 * 2
    assert shape.cached(1, 16_384) == (8 * width, 40 * 1024 * width)
    assert shape.cached(1, 1024) == (48 * width, 0)
    assert shape.cached(1, 0) == (8 * width, 40 * 1024 * width)
    assert shape.kv_bytes == 2 * 8 * width
    assert MODELS["Qwen2.5-7B"].cached(1, 16_384) == (28 * 4 * 128 * 2, 0)


def test_states_do_not_grow() -> None:
    """Qwen3-Next: 12 layers of 2 heads of 256; 36 with a state of 32 x 128 x 128 and the last
    three tokens' 2 x 16 x 128 + 32 x 128 values before the convolution."""
    state = 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)
    shape = MODELS["Qwen3-Next-80B-A3B"]
    assert shape.cached(1, 16_384) == (12 * 2 * 256 * 2, 36 * state)
    # Eight devices: each has one of two heads.
    assert shape.cached(8, 16_384) == (12 * 8 * 256 * 2, 36 * state)


def test_a_latent_is_on_every_device() -> None:
    shape = MODELS["DeepSeek-V3"]
    assert shape.cached(1, 4096) == (61 * (512 + 64), 0)
    assert shape.cached(8, 4096) == (8 * 61 * (512 + 64), 0)


def test_layers_without_experts() -> None:
    """DeepSeek's first three; Qwen3's by step and by name."""
    assert [layer.experts for layer in MODELS["DeepSeek-V3"].blocks[:5]] == [0, 0, 0, 256, 256]
    config = {**CONFIGS["Qwen3-30B-A3B"], "num_hidden_layers": 6}
    sparse = ModelShape.from_config(config | {"decoder_sparse_step": 2}, "it")
    assert [layer.experts > 0 for layer in sparse.blocks] == [False, True] * 3
    sparse = ModelShape.from_config(config | {"mlp_only_layers": [0, 4]}, "it")
    assert [n for n, layer in enumerate(sparse.blocks) if not layer.experts] == [0, 4]
    assert sparse.blocks[0].inner == 6144
    assert sparse.blocks[1].inner == 8 * 768


def test_what_a_layer_has_otherwise() -> None:
    """``per_layer_config``, as transformers 5 gives it for Gemma 4."""
    config = {**CONFIGS["Gemma-3-1B"], "per_layer_config": {"05": {"head_dim": 512}}}
    shape = ModelShape.from_config(config, "it")
    assert [layer.kv_width for layer in shape.blocks[4:7]] == [512, 1024, 512]


def test_a_count_goes_before_the_formula() -> None:
    count = WeightCount(1000, 600, 500)
    shape = ModelShape.from_config({**CONFIGS["Qwen3-0.6B"], "model_type": "new"}, "it", count)
    assert (shape.kind, shape.parameters, shape.active) == ("new", 1000, 600)


def test_a_step_meets_more_experts_with_more_tokens() -> None:
    """Mixtral: two of eight experts for one token, for two 8 x (1 - 0.75 x 0.75) of them."""
    shape = MODELS["Mixtral-8x7B"]
    assert shape.met(1) == pytest.approx(shape.active)
    shared = shape.parameters - shape.count.experts
    assert shape.met(2) == pytest.approx(shared + shape.count.experts * (1 - 0.75**2))
    assert shape.met(200) == pytest.approx(shape.parameters, rel=1e-6)
    assert MODELS["Qwen3-8B"].met(1) == MODELS["Qwen3-8B"].parameters


def test_costs_of_experts_by_hand() -> None:
    """A decode step reads what its tokens meet; flops are the active parameters'."""
    shape = MODELS["Qwen3-30B-A3B"]
    costs = GpuCosts(device=H100, shape=shape, tp=8)
    reduced = 2 * 48 * 2048 * 2 * 2 * 7 / (8 * 360e9)
    for batch in (1, 64):
        weights = 2 * shape.met(batch) / (8 * 3.35e12 * 0.92)
        fixed = 4.5e-3 + 50e-6 * 48 + batch * (60e-6 + reduced) + weights
        assert costs.step_s(batch, 0) == pytest.approx(fixed, rel=1e-12)
    assert costs.prefill_s(100) == pytest.approx(200 * shape.active / (8 * 989e12 * 0.5))
    # Eight GPUs hold its four heads of keys and values twice.
    assert costs.capacity == pytest.approx(
        (8 * (80e9 * 0.85 - 4e9) - shape.weight_bytes) / (2 * 98304)
    )
    trained = TrainCosts.on_gpus(H100, shape, gpus=8, launch_s=0.0, mfu=0.25)
    assert trained.token_s == pytest.approx(12 * shape.active / (8 * 989e12 * 0.25))


def test_costs_of_windows_and_states_by_hand() -> None:
    """What does not grow is read once a step for each sequence, and takes room for each."""
    shape = MODELS["Gemma-3-12B"]
    costs = GpuCosts(device=H100, shape=shape, longest=16_384)
    token, sequence = (2 * values for values in shape.cached(1, 16_384))
    assert costs.capacity == pytest.approx((80e9 * 0.85 - 4e9 - shape.weight_bytes) / token)
    assert costs.slack == pytest.approx(BLOCK_SLACK + sequence / token)
    assert costs.slack == BLOCK_SLACK + 5 * 1024
    assert costs.slope == pytest.approx(token / (3.35e12 * 0.75))
    more = costs.step_s(2, 0) - costs.step_s(1, 0)
    assert more == pytest.approx(60e-6 + sequence / (3.35e12 * 0.75))
    short = GpuCosts(device=H100, shape=shape, longest=1024)
    assert short.slack == BLOCK_SLACK
    assert short.capacity == pytest.approx(costs.capacity / 6)


def test_a_model_without_attention_has_room_for_sequences() -> None:
    """Of full length; a token is its part of one."""
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    shape = ModelShape.from_config(AutoConfig.for_model("mamba2").to_dict(), "it")
    assert (shape.heads, shape.kv_heads, shape.kv_bytes) == (0, 0, 0)
    costs = GpuCosts(device=H100, shape=shape, tp=2, longest=1000)
    _, state = shape.cached(2, 1000)
    free = 2 * (80e9 * 0.85 - 4e9) - shape.weight_bytes
    assert costs.capacity / 1000 == pytest.approx(free / (2 * state))


def test_sizes_in_words() -> None:
    assert MODELS["Qwen2.5-7B"].count.words == "7.62B parameters"
    assert MODELS["Qwen3-30B-A3B"].count.words == "30.5B parameters, 3.35B active"
    assert WeightCount(999, 999).words == "999 parameters"


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen/Qwen2-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-Math-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-7B-Instruct-1M", 7_615_616_512),
        ("Qwen/Qwen2.5-Coder-32B-Instruct", 32_763_876_352),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("Qwen/QwQ-32B", 32_763_876_352),
        ("~/models/Qwen2.5-32B/", 32_763_876_352),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),  # its head is its own
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 8_030_261_248),
        ("deepseek-ai/deepseek-llm-7b-chat", 6_910_365_696),
        ("deepseek-ai/DeepSeek-V3-0324", 671_026_404_352),
        ("meta-llama/Meta-Llama-3-8B-Instruct", 8_030_261_248),
        ("meta-llama/Llama-2-7b-chat-hf", 6_738_415_616),
        ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552),
        ("mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400),
        ("mistralai/Mistral-Small-24B-Instruct-2501", 23_572_403_200),
        ("google/gemma-2-9b-it", 9_241_404_928),
        ("google/gemma-3-12b-it", 11_765_788_416),
        ("microsoft/phi-4", 14_659_507_200),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384),
        ("openai/gpt-oss-20b", 20_911_000_000),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 79_674_286_848),
    ],
)
def test_names_of_the_hub(name: str, weights: int) -> None:
    assert find_model(name).parameters == pytest.approx(weights, rel=1e-3)


def test_a_model_is_itself_and_not_one_of_another_size() -> None:
    assert all(find_model(name) is shape for name, shape in MODELS.items())
    for name in ("Qwen2.5-7", "Qwen2-57B-A14B", "Qwen2.5-VL-7B-Instruct", "Math-7B"):
        with pytest.raises(ValueError, match="unknown model"):
            find_model(name)
