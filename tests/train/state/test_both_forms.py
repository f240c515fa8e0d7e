"""Checkpoints in the fields of transformers 4 beside those of 5, without a release 4 to read them:
``tests/job/run/test_transformers4.py`` has one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import checkpoint_readings as readings
import families
import pytest
from tokenizers import normalizers
from transformers import AutoConfig, AutoTokenizer

from rollpacker.train.state.checkpoint import older_fields, rewrite, with_older_fields, write_beside

LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def nested(whole: dict[str, Any], local: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


def plain(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


FIELDS: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("qwen2", {"rope_parameters": plain(1e6)}, {"rope_theta": 1e6, "rope_scaling": None}),
    (
        "llama",
        {"rope_parameters": YARN | {"rope_theta": 5e5}},
        {"rope_theta": 5e5, "rope_scaling": YARN},
    ),
    (
        "glm4",
        {"rope_parameters": plain(3e4, partial_rotary_factor=0.5)},
        {"rope_theta": 3e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
    ),
    (
        "gpt_neox",
        {"rope_parameters": plain(3e4, partial_rotary_factor=0.5)},
        {"rotary_emb_base": 3e4, "rotary_pct": 0.5, "rope_scaling": None},
    ),
    (
        "gemma3_text",
        nested(LINEAR | {"rope_theta": 1e6}, plain(2e4)),
        {"rope_theta": 1e6, "rope_scaling": LINEAR, "rope_local_base_freq": 2e4},
    ),
    (
        "modernbert-decoder",
        nested(plain(2e5), plain(2e4)),
        {"global_rope_theta": 2e5, "local_rope_theta": 2e4},
    ),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2}, {"num_experts": 6}),
    ("gpt2", {}, {"torch_dtype": "float32"}),
    # Its windows have a rope of their own.
    ("olmo3", nested(plain(5e5), plain(2e4)), None),
    ("gemma3_text", nested(plain(1e6), LINEAR | {"rope_theta": 2e4}), None),
]


@pytest.mark.parametrize(("family", "given", "wanted"), FIELDS)
def test_fields_of_both_releases(
    family: str, given: dict[str, Any], wanted: dict[str, Any] | None, tmp_path: Path
) -> None:
    AutoConfig.for_model(family, **given, dtype="float32").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path).to_dict()
    before = json.loads((tmp_path / "config.json").read_text())
    found = older_fields(before)
    assert (found is None) == (wanted is None)
    assert {key: (found or {})[key] for key in wanted or {}} == (wanted or {})
    rewrite(tmp_path / "config.json", with_older_fields)
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == before | (found or {})
    read = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {key: read[key] for key in config} == config


def test_the_text_model_of_a_composed_one_and_infinity(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gemma3", **families.COMPOSED, dtype="bfloat16")
    config.text_config.rope_parameters["full_attention"]["rope_theta"] = 333.0
    found = with_older_fields(json.loads(config.to_json_string()))
    assert found["torch_dtype"] == "bfloat16"
    assert (found["text_config"]["rope_theta"], "rope_theta" in found) == (333.0, False)
    AutoConfig.for_model("bamba", time_step_limit=(0.0, math.inf)).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    rewrite(tmp_path / "config.json", with_older_fields)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"] == [0.0, math.inf]
    assert AutoConfig.from_pretrained(tmp_path).time_step_limit == (0.0, math.inf)


def test_files_beside_the_weights_are_copied(tmp_path: Path) -> None:
    """Byte for byte where they are in release 4's form."""
    source, folder = tmp_path / "source", tmp_path / "folder"
    folder.mkdir()
    readings.make_tokenizer().save_pretrained(source)
    config = json.loads((source / "tokenizer_config.json").read_text())
    own = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|im_end|>"],
    }
    (source / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "backend"} | own)
    )
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_text("weights")
    write_beside(folder, AutoTokenizer.from_pretrained(source, local_files_only=True), source)
    names = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    assert names == {
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("generation_config.json", "additional_chat_templates/tools.jinja"),
    }
    for name in names:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name


@pytest.mark.parametrize("copied", [True, False])
def test_a_tokenizer_in_release_5s_form(copied: bool, tmp_path: Path) -> None:
    made = readings.make_tokenizer(
        extra_special_tokens=["<|im_start|>"],
        model_specific_special_tokens={"image_token": "<|endoftext|>"},
    )
    made.save_pretrained(tmp_path / "source")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "source", local_files_only=True)
    loaded.backend_tokenizer.normalizer = normalizers.NFC()  # as release 5 does to some
    (tmp_path / "folder").mkdir()
    write_beside(tmp_path / "folder", loaded, tmp_path / "source" if copied else None)
    found = json.loads((tmp_path / "folder" / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert found["additional_special_tokens"] == ["<|im_start|>"]
    assert found["extra_special_tokens"] == {"image_token": "<|endoftext|>"}
    assert not {"local_files_only", "is_local", "backend"} & found.keys()
    again = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert again.all_special_tokens == loaded.all_special_tokens
    assert again("e\u0301")["input_ids"] == loaded("\u00e9")["input_ids"]
