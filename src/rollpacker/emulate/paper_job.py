"""A job with the paper's settings on emulated devices: its files and its configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rollpacker.config import RunConfig, parse
from rollpacker.policy.settings import USUAL_MICRO_BATCH
from rollpacker.sim.costs import calibration
from rollpacker.sim.costs.calibration import Calibration

_MOST_GRADERS = 32
_EOS = "<eos>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A setting of the RollPacker paper (section 6), on a share of its devices.

    Args:
        workload: source of lengths, a shipped model's name or a trace.
        gpus: the step's prompts are as many for each GPU as in the paper.
        factor: emulated seconds in one second of the clock.
        devices: more keys for the file of devices.
    """

    calibration: str
    workload: str
    gpus: int
    factor: float
    steps: int = 1
    devices: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def costs(self) -> Calibration:
        return calibration.load(self.calibration)


def paper_job(
    paper: Paper, mode: str, folder: Path, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """The configuration in one mode. It writes its files below ``folder``, and the run goes there.
    ``overrides`` has keys for sections."""
    costs = paper.costs
    _write_files(paper, folder)
    ours: dict[str, Any] = {
        "output": str(folder / mode),
        "steps": paper.steps,
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "rows.jsonl"), "shuffle": False},
        "rewards": [{"function": "rollpacker.emulate.reward:Timed"}],
        "grading": {"workers": min(_MOST_GRADERS, max(8, paper.gpus // 8))},
        "rollout": {
            "prompts_per_step": costs.prompts * paper.gpus // costs.gpus,
            "num_generations": costs.responses,
            "max_completion_length": costs.response_cap,
            "tail_batching": {"mode": mode, "race_responses": mode == "auto"},
        },
        "train": {"micro_batch_tokens": USUAL_MICRO_BATCH},
        "engine": {
            "kind": "vllm",
            "tensor_parallel": costs.rollout_tp,
            "max_running": 1024,
        },
        "trainer": {"kind": "fsdp", "shard": costs.train_gpus},
        "devices": {"per_node": paper.gpus, "emulate": str(folder / "devices.yaml")},
    }
    for section, keys in (overrides or {}).items():
        ours[section] = ours.get(section, {}) | keys
    rows = 2 * ours["rollout"]["prompts_per_step"] * paper.steps
    lines = ({"id": f"p{i}", "prompt": f"Question {i}", "answer": ""} for i in range(rows))
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    return parse(ours, source="emulated job")


def _write_files(paper: Paper, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    devices = {
        "calibration": paper.calibration,
        "workload": paper.workload,
        "factor": paper.factor,
        **paper.devices,
    }
    (folder / "devices.yaml").write_text(yaml.safe_dump(devices), encoding="utf-8")
    shape = paper.costs.shape
    Qwen2Config(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.blocks[0].inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=1 << 16,
    ).save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "model")


def _tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, _EOS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS)
