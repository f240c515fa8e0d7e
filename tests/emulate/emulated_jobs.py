"""Small jobs on emulated devices: a tokenizer without weights, rows, and a file of devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from transformers import Qwen2Config, Qwen2Tokenizer

from rollpacker import config
from rollpacker.config import RunConfig

HEADS = 40
WORDS = 128


def write_model(folder: Path, words: int = WORDS) -> Path:
    """What the driver reads of a model; there are no weights."""
    Qwen2Config(
        num_attention_heads=HEADS, num_key_value_heads=8, max_position_embeddings=1 << 16
    ).save_pretrained(folder)
    vocabulary = {chr(33 + number): number for number in range(words)}
    Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token="!", eos_token="!", pad_token="!"
    ).save_pretrained(folder)
    return folder


def write_devices(path: Path, **changes: Any) -> Path:
    """Engines of a 14B model, with the paper's lengths."""
    devices = {"calibration": "paper-14b-16k", "workload": "paper-8k", "factor": 2000.0}
    path.write_text(yaml.safe_dump(devices | changes), encoding="utf-8")
    return path


def job(folder: Path, mode: str = "exact", *, rows: int = 24, **changes: Any) -> RunConfig:
    """A job on eight emulated devices: engines of two, replicas of four.

    ``changes`` are dotted keys with ``__`` for the dots.
    """
    data = folder / "rows.jsonl"
    lines = [json.dumps({"id": f"p{n}", "prompt": f"w{n}"}) for n in range(rows)]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tree: dict[str, Any] = {
        "output": str(folder / mode),
        "steps": 3,
        "model": {"path": str(write_model(folder / "model"))},
        "data": {"path": str(data), "label_key": ""},
        "rewards": [{"function": "rollpacker.emulate.reward:Timed"}],
        "rollout": {
            "prompts_per_step": 8,
            "num_generations": 4,
            "max_completion_length": 4096,
            "tail_batching": {"mode": mode},
            "streaming": {"group_tokens": 4096},
        },
        "engine": {"kind": "vllm", "tensor_parallel": 2},
        "trainer": {"kind": "fsdp", "shard": 4},
        "devices": {"per_node": 8, "emulate": str(write_devices(folder / "devices.yaml"))},
    }
    for key, value in changes.items():
        node = tree
        *path, last = key.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return config.parse(tree)
