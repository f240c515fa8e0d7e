"""What is exported has the names, types and values of ``save_pretrained``'s, for any family."""

from __future__ import annotations

import json

import families
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rollpacker.checkpoint_names import CheckpointNames, possible_names, stored
from rollpacker.train.state import checkpoint
from rollpacker.train.state.checkpoint import rewrite, with_older_fields

DENSE = (
    *("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi3", "glm4", "smollm3", "olmo3"),
    *("gemma3_text", "gemma4_text", "lfm2"),
)
FUSED = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "minimax_m2", "glm4_moe", "deepseek_v3"),
    *("qwen3_next", "nemotron_h, experts"),
)
AS_THEY_ARE = ("gpt_oss", "granitemoe", "llama4_text")
"""Experts that checkpoints hold as they are in memory."""
ROUNDED = ("llama", "lfm2", "qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss")
"""Of each way to be stored one or two; some keep a part in float32 whatever is asked for."""


def exported(model):
    return dict(CheckpointNames(model).converted(stored(model)))


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert found[name].dtype == weight.dtype, name
        assert torch.equal(found[name], weight), name


SEES = {
    "qwen3_5": (
        {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 128},
        "model.language_model.layers.0.",
    ),
    "gemma3": (
        {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "image_size": 28},
        "language_model.model.layers.0.",
    ),
}
"""Configuration of what sees, and how names of a layer begin."""


@pytest.mark.parametrize("kind", SEES)
def test_names_of_a_checkpoint_with_a_part_that_sees_are_known(kind, tmp_path):
    """Of the hub's checkpoint the trainer loads what is text: its names are among the possible."""
    vision, begin = SEES[kind]
    text = families.make("qwen3_5_text" if kind == "qwen3_5" else "gemma3_text").config.to_dict()
    more = {"mm_tokens_per_image": 4} if kind == "gemma3" else {}
    whole = {"text_config": text, "vision_config": vision | {"intermediate_size": 48}, **more}
    config = AutoConfig.for_model(kind, **whole)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    trained = frozenset(CheckpointNames(AutoModelForCausalLM.from_pretrained(tmp_path)).layout)
    assert trained <= load_file(tmp_path / "model.safetensors").keys()
    assert any(name.startswith(begin) for name in trained)
    with torch.device("meta"):
        like = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert trained in possible_names(like)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_next"])
def test_most_checkpoints_can_have_no_other_names(kind):
    model = families.make(kind)
    assert possible_names(model) == (frozenset(CheckpointNames(model).layout),)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=pytest.mark.wide if twice and kind not in ROUNDED else ())
        for twice, dtype in enumerate((torch.float32, torch.bfloat16))
        for kind in (*DENSE, *FUSED, *AS_THEY_ARE)
    ],
)
def test_what_is_exported_is_what_transformers_saves_and_loads(kind, dtype, tmp_path):
    """Of a model that was made, and of one that was loaded."""
    model = families.make(kind).to(dtype)
    for number in range(2):
        theirs, ours = tmp_path / f"theirs-{number}", tmp_path / f"ours-{number}"
        model.save_pretrained(theirs)
        names, weights = CheckpointNames(model), exported(model)
        assert_same(weights, load_file(theirs / "model.safetensors"))
        assert list(names.layout.items()) == [(n, (w.dtype, w.shape)) for n, w in weights.items()]
        live = names.converted(stored(model))
        checkpoint.save_model(ours, model, make_tokenizer(), names.layout, live)
        rewrite(theirs / "config.json", with_older_fields)
        mine, his = ((each / "config.json").read_text() for each in (ours, theirs))
        assert json.loads(mine) == json.loads(his)
        loaded = AutoModelForCausalLM.from_pretrained(ours)
        back = dict(stored(loaded))  # some of it in float32 whatever is asked for
        assert_same({n: back[n].to(w.dtype) for n, w in stored(model)}, dict(stored(model)))
        model = loaded


@pytest.mark.parametrize("kind", DENSE)
def test_weights_that_need_no_conversion_are_the_live_ones_in_their_order(kind):
    model = families.make(kind)
    own = list(stored(model))
    weights = list(CheckpointNames(model).converted(iter(own)))
    assert [w.data_ptr() for _, w in weights] == [w.data_ptr() for _, w in own]
    if kind in ("llama", "qwen2", "qwen3"):
        named = model.named_parameters()
        assert [(n, w.data_ptr()) for n, w in weights] == [(n, p.data_ptr()) for n, p in named]


def _number(name):
    return name.split("layers.")[1].split(".")[0]


@pytest.mark.parametrize("kind", FUSED)
def test_a_layer_is_given_out_before_the_next_one_is_asked_for(kind):
    model = families.make(kind)
    fused = {name for name, weight in stored(model) if weight.ndim == 3 and "experts" in name}
    assert fused
    waiting: set[str] = set()

    def watched():
        for name, weight in stored(model):
            if name in fused:
                waiting.add(_number(name))
            yield name, weight

    done = 0
    for name, _ in CheckpointNames(model).converted(watched()):
        assert len(waiting) <= 1
        if ".experts." in name and waiting:
            assert _number(name) == waiting.pop()
            done += 1
    assert done == len({name.split(".experts.")[0] for name in fused})


def test_layers_that_cannot_be_converted_alone_are_converted_together(monkeypatch):
    """Of a family that stores the experts of all layers as one tensor."""
    model = families.make("mixtral")

    def stacked(_model, weights):
        fused = [n for n in weights if n.endswith("experts.down_proj")]
        if not fused:
            return weights
        rest = {n: w for n, w in weights.items() if n not in fused}
        return rest | {"all": torch.cat([weights[n] for n in fused])}

    monkeypatch.setattr("rollpacker.checkpoint_names.revert_weight_conversion", stacked)
    names = CheckpointNames(model)
    weights = dict(names.converted(stored(model)))
    assert weights["all"].shape[0] == 8
    assert names.layout == {n: (w.dtype, w.shape) for n, w in weights.items()}


def test_names_are_known_without_weights():
    model = families.make("glm4_moe")
    with torch.device("meta"):
        like = AutoModelForCausalLM.from_config(model.config)
    layout = CheckpointNames(like).layout
    assert layout == CheckpointNames(model).layout
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in layout
