"""A tiny model and a few prompts for TRL's trainer, plain and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from rollpacker.demo.model import build_model, build_tokenizer

PROMPTS = 12


def ones(completions: list[str], **_: Any) -> list[float]:
    return [text.count("1") / 4 for text in completions]


def short(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-len(ids) / 10 for ids in completion_ids]


def dataset(count: int = PROMPTS) -> Dataset:
    return Dataset.from_list([{"prompt": f"{n}, {n + 1}", "number": n} for n in range(count)])


def arguments(folder: Path, **options: Any) -> GRPOConfig:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 24,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "beta": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "seed": 3,
    }
    return GRPOConfig(**(given | options))


def saved_model(folder: Path) -> str:
    """A reference model is loaded from where its model was."""
    place = folder / "model"
    build_model(0).save_pretrained(place)
    return str(place)


def trainer(kind: type, folder: Path, *, rewards: Any = (ones, short), **options: Any) -> Any:
    own = {name: options.pop(name) for name in list(options) if name in _OWN}
    model = own.pop("model", None) or saved_model(folder)
    torch.manual_seed(3)  # older releases draw adapters before they seed
    return kind(
        model=model,
        reward_funcs=list(rewards) if isinstance(rewards, tuple) else rewards,
        args=arguments(folder, **options),
        train_dataset=own.pop("train_dataset", None) or dataset(),
        processing_class=build_tokenizer(),
        **own,
    )


_OWN = (
    "model",
    "train_dataset",
    "eval_dataset",
    "callbacks",
    "peft_config",
    "rollout_func",
    "tail_batching",
    "reward_threads",
    "engine",
    "tools",
)


def weights(of: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in of.model.state_dict().items()}
