"""Checkpoints of real runs are the same model to transformers 4, and to the release that wrote
them; runs begin with checkpoints of either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_readings as readings
import numpy as np
import pytest
from runtime_jobs import Workshop, run

ROOT = Path(__file__).parents[3]
OLD = ROOT / ".venv-tf4"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
FAKE = {"engine": {"kind": "fake"}, "train__sampler_correction": {"kind": "none"}}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2, bfloat16": (
        "qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"model__dtype": "bfloat16"},
    ),
    "llama3 rope": ("llama", {"rope_parameters": readings.LLAMA3 | {"rope_theta": 5e5}}, {}),
    "yarn": ("qwen2", {"rope_parameters": YARN | {"rope_theta": 1e6}}, {}),
    "linear rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4}},
        {},
    ),
    "tied": ("qwen3", {"tie_word_embeddings": True, "head_dim": 16}, {}),
    "oddly tied": ("qwen2", {}, {}),
    "lora": ("qwen3", {"head_dim": 16}, {"model__lora_rank": 4}),
    "experts": ("qwen3_moe", MOE, FAKE),
}


def with_old(*words: object) -> str:
    """Run the readings with release 4."""
    script = ROOT / "tests" / "train" / "support" / "checkpoint_readings.py"
    command = [sys.executable, str(script), *map(str, words)]
    env = os.environ | {"PYTHONPATH": str(OLD), "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout


def write_case(folder: Path, name: str) -> Path:
    family, more, _ = CASES[name]
    readings.make_model(family, **more).save_pretrained(folder)
    # Some of it is what a conversation is made of, and all that release 5 names otherwise.
    readings.make_tokenizer(extra_special_tokens=[readings.SPECIALS[1]]).save_pretrained(folder)
    if name == "oddly tied":
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def train(shop: Workshop, name: str, model: Path, steps: int = 1, **changes: Any) -> Path:
    """Some steps of it, resumed after the first; its checkpoint."""
    settings = {
        "model__path": str(model),
        "rollout__prompts_per_step": 2,
        "rollout__max_completion_length": 16,
        **changes,
    }
    folder, _ = run(shop.config(name, "off", steps=1, **settings))
    if steps > 1:
        folder, _ = run(shop.config(name, "off", steps=steps, **settings), resume=True)
    return folder / f"checkpoint-{steps}"


@pytest.mark.transformers4
def test_both_releases_read_the_same_model(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    with_old("write", tmp_path / "old")
    began = {f"old {family}": tmp_path / "old" / family for family in readings.OLD}
    began |= {name: write_case(tmp_path / "new" / name, name) for name in CASES}
    changes = {name: more for name, (_, _, more) in CASES.items()} | {"old qwen2": {"steps": 2}}
    ended = {
        name: train(shop, name, place, **changes.get(name, {})) for name, place in began.items()
    }
    old_began = [place for name, place in began.items() if name.startswith("old ")]
    said = json.loads(with_old("read", *ended.values(), *old_began))
    assert said["release"].startswith("4.57.")
    for folder in [*ended.values(), *old_began]:
        found, now = said["found"][str(folder)], readings.read(folder)
        off = np.abs(np.subtract(found.pop("logprobs"), now.pop("logprobs"))).max()
        assert off < 1e-5, folder
        assert found == now, folder
        assert found["special"] == sorted(readings.SPECIALS), folder
    assert not json.loads((ended["oddly tied"] / "config.json").read_text())["tie_word_embeddings"]
