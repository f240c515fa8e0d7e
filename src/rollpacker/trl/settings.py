"""A trainer's arguments as the configuration of a run, and what is not supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from datasets import IterableDataset
from packaging.version import Version

from rollpacker.config import RunConfig
from rollpacker.config.rollout import (
    RACED,
    EngineConfig,
    MiniEngineConfig,
    TailBatchingConfig,
    TailMode,
)
from rollpacker.engine.base import SamplingParams

TESTED = ("1.0.0", "1.16.0")
"""Oldest and newest release of TRL that the tests run with."""
SEAMS = (
    "_generate_and_score_completions",
    "_tokenize_prompts",
    "training_step",
    "train",
)
"""Methods of TRL's trainer that are overridden or called; the ones with ``_`` are private."""

Check = Callable[[Any], bool]


def check_release(trainer: type, version: str) -> None:
    """Raise ``ImportError`` for a release whose trainer is not the one that is extended here."""
    oldest, newest = TESTED
    moved = [name for name in SEAMS if not hasattr(trainer, name)]
    if moved or Version(version) < Version(oldest) or Version(version).major > 1:
        lacks = f": its GRPOTrainer has no {', '.join(moved)}" if moved else ""
        raise ImportError(
            f"rollpacker.trl works with TRL {oldest} to {newest} (those are tested), not with "
            f"{version}{lacks}"
        )


_UNSUPPORTED: dict[str, Check] = {
    "tools": lambda t: bool(getattr(t, "tools", None)),
    "environment_factory": lambda t: (
        bool(getattr(t, "environments", None))
        or getattr(t, "environment_factories", None) is not None
    ),
    "rollout_func": lambda t: t.rollout_func is not None,
    "images (a processor for processing_class)": lambda t: bool(getattr(t, "_is_vlm", False)),
    "use_vllm (vLLM decodes with engine=VllmEngineConfig() of rollpacker.config)": lambda t: (
        t.use_vllm
    ),
    "use_transformers_paged": lambda t: bool(t.args.use_transformers_paged),
    "use_transformers_continuous_batching": lambda t: bool(
        getattr(t.args, "use_transformers_continuous_batching", False)
    ),
    "use_liger_kernel": lambda t: bool(t.args.use_liger_kernel),
    "cast_lm_head_to_fp32": lambda t: bool(getattr(t.args, "cast_lm_head_to_fp32", False)),
    "min_p": lambda t: t.args.min_p is not None,
    "repetition_penalty": lambda t: t.args.repetition_penalty != 1.0,
    "generation_kwargs": lambda t: bool(t.args.generation_kwargs),
    "cache_implementation": lambda t: t.args.cache_implementation is not None,
    "DeepSpeed": lambda t: bool(t.is_deepspeed_enabled),
    "FSDP": lambda t: bool(t.is_fsdp_enabled),
    "a quantized model": lambda t: getattr(t.model, "quantization_method", None) is not None,
}
"""What a run would silently do otherwise, by the argument that asks for it."""


def check_supported(trainer: Any, tail: TailBatchingConfig, engine: EngineConfig) -> None:
    """Raise ``ValueError`` in one line for arguments that rounds of ours do not know."""
    found = [name for name, asks in _UNSUPPORTED.items() if asks(trainer)]
    if found:
        raise ValueError(
            f"rollpacker.trl.GRPOTrainer does not support {', '.join(found)}: leave it out, or "
            "train with trl.GRPOTrainer"
        )
    if not isinstance(engine, MiniEngineConfig) and trainer.accelerator.num_processes > 1:
        raise ValueError(
            f"engine.kind={engine.kind}: several processes decode with the built-in engine only"
        )
    if tail.mode in RACED and isinstance(trainer.train_dataset, IterableDataset):
        raise ValueError(
            f"tail_batching='{tail.mode}' draws more prompts than a step needs, which an iterable "
            "data set cannot give: load it whole, or take 'exact'"
        )
    if tail.long_round_steps > 1 or tail.bucket_rounds > 1:
        raise ValueError(
            "tail_batching: long_round_steps and bucket_rounds must be 1: the trainer makes the "
            "updates of one round before the next"
        )
    local, group = local_batch(trainer), trainer.num_generations
    if local % group:
        raise ValueError(
            f"per_device_train_batch_size x steps_per_generation is {local} responses on each "
            f"device, which is no multiple of num_generations={group}: groups would be cut"
        )


def local_batch(trainer: Any) -> int:
    """Responses that this process samples at a time."""
    return trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation


def tail_config(given: TailMode | TailBatchingConfig) -> TailBatchingConfig:
    """What ``tail_batching`` asks for. Raises ``ValueError`` on another mode."""
    if isinstance(given, TailBatchingConfig):
        return given
    return TailBatchingConfig.model_validate({"mode": given})


def run_config(
    trainer: Any, tail: TailBatchingConfig, engine: EngineConfig, output: str
) -> RunConfig:
    """The run, for its files and its policy; what the trainer does itself is only noted."""
    args, accelerator = trainer.args, trainer.accelerator
    weights = trainer.reward_weights.tolist()
    return RunConfig.model_validate(
        {
            # Groups of one prompt on two devices must not be the same samples.
            "seed": args.seed + 1_000_003 * accelerator.process_index,
            "output": output,
            "deterministic": bool(args.full_determinism),
            "model": {
                "path": getattr(trainer.model.config, "_name_or_path", "") or "model",
                "dtype": str(trainer.model.dtype).removeprefix("torch."),
            },
            "data": {"path": "train_dataset", "shuffle": bool(args.shuffle_dataset)},
            "engine": engine,
            "rewards": [
                {"function": f"trainer:{name}", "name": name, "weight": weight}
                for name, weight in zip(reward_names(trainer), weights, strict=True)
            ],
            "rollout": {
                "prompts_per_step": local_batch(trainer) // trainer.num_generations,
                "num_generations": trainer.num_generations,
                "max_completion_length": args.max_completion_length,
                "temperature": args.temperature,
                "top_p": args.top_p,
                "top_k": args.top_k or 0,
                "tail_batching": tail,
            },
            "train": {
                "learning_rate": args.learning_rate or None,
                "beta": args.beta,
                "algorithm": {"kind": "grpo", "scale_rewards": args.scale_rewards},
            },
        }
    )


def reward_names(trainer: Any) -> list[str]:
    """The functions' names in the metrics; of equal ones the later ones are numbered."""
    names: list[str] = []
    for name in trainer.reward_func_names:
        number, free = 1, name
        while free in names:
            number += 1
            free = f"{name} {number}"
        names.append(free)
    return names


def sampling_params(trainer: Any) -> SamplingParams:
    """How the trainer samples. It stops where TRL does: else truncation is counted otherwise."""
    args, tokenizer = trainer.args, trainer.processing_class
    ends = getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        stop_token_ids=tuple(int(token) for token in ends),
    )
