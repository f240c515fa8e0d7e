"""TRL: rules for several keys of ``trl grpo``. The others are in ``trl.yaml``."""

from __future__ import annotations

import math
from functools import cache

from rollpacker.cli.convert.table import (
    CORRECTION,
    KIND,
    UPDATES,
    Draft,
    Table,
    correct,
    differ,
    fit,
    machines,
    warm_up,
    whole_batch,
)

MARKS = (
    "reward_funcs",
    "reward_model_name_or_path",
    "num_generations",
    "max_completion_length",
    "generation_batch_size",
)
"""Keys that mark its configurations for GRPO."""

_WORLD = "num_processes"
_REWARDS = ("reward_model_name_or_path", "reward_funcs", "reward_weights")
_WEIGHTS = "vllm_importance_sampling_"
_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
_LOSSES = {"dapo": "grpo", "bnpo": "grpo", "grpo": "grpo", "dr_grpo": "dr_grpo"}


def _start(draft: Draft) -> None:
    draft.set("data.drop_last", True, note="TRL drops the prompts that do not fill a batch")
    if not draft.get("use_peft"):
        draft.drop("model.lora_rank", "use_peft is off")
        draft.ignore("use_peft is off", *(key for key in draft.given if key.startswith("lora_")))
    elif not draft.has("lora_target_modules"):
        draft.warnings.append(
            "model.lora_rank: adapters are on all linear layers, but peft's default is some of them"
        )
    if draft.get("datasets") and not draft.asked.data:
        draft.refuse("put the data sets into one file, and give --data", "datasets")
        for path in ("data.path", "data.options.name", "data.split"):
            draft.drop(path, "datasets overrides it")


def _batch(draft: Draft) -> None:
    """TRL counts responses per process, but a step here counts prompts."""
    device, together = "per_device_train_batch_size", "gradient_accumulation_steps"
    each, whole = "steps_per_generation", "generation_batch_size"
    if draft.asked.world:
        draft.refused.pop(_WORLD, None)
        draft.ignore("--world overrides it", _WORLD)
    elif not draft.has(_WORLD):
        draft.warnings.append(
            "rollout.prompts_per_step: the file does not give the number of processes, so one is "
            "assumed: give --world N"
        )
    if {device, together, each, whole, "num_generations"} & draft.refused.keys():
        draft.set(UPDATES, 1, note="the file does not contain the whole batch: set it by hand")
        return
    world = draft.asked.world or draft.number(_WORLD, 1)
    at_once, steps = draft.number(device, 1) * world, draft.number(together, 1)
    count = draft.number("num_generations", 1)
    key = next((key for key in (whole, each) if draft.has(key)), together)
    per = draft.number(key, 1) / (at_once if key == whole else 1)
    # Rounds shorter than an update are sampled with the same weights, so they are one step here.
    responses = max(per, steps) * at_once
    if per % 1 or responses % count:
        raise ValueError(
            f"{draft.file}: {responses:g} responses of a batch ({draft.origin(device)}, {world} "
            f"processes, {draft.origin(key)}) are not a multiple of "
            + (f"{at_once}" if per % 1 else f"num_generations={count}")
            + ("" if draft.asked.world else ": give --world N, the number of processes")
        )
    key = key if per > steps else together
    keys = (device, *([_WORLD] if draft.has(_WORLD) else ()), key)
    note = f"{responses:g} responses of {world} processes / {count}"
    draft.set("rollout.prompts_per_step", int(responses // count), *keys, note=note)
    updates = max(1, int(per // steps))
    draft.set(UPDATES, updates, key, together, note=whole_batch(updates))
    if per > steps and per % steps:
        draft.refuse(f"mini-batches are equal here: {per // steps:g} updates per step", key)


def _algorithm(draft: Draft) -> None:
    loss, level, scale = "loss_type", "importance_sampling_level", "scale_rewards"
    low, high = draft.get("epsilon"), draft.get("epsilon_high") or draft.get("epsilon")
    kind, keys = draft.known(loss, _LOSSES), (loss,)
    if draft.get("trainer") == "RLOOTrainer":
        kind, keys = "rloo", ("trainer",)
        draft.warnings.append(
            "train.beta: TRL's RLOO puts the KL into a response's reward, here it is in the loss"
        )
    elif draft.get(level) == "sequence":
        kind, keys = "gspo", (level, loss)
        if draft.get(loss) != "grpo":
            draft.refuse("gspo averages over responses, as loss_type=grpo does", loss)
        if not draft.has("epsilon_high"):
            draft.set("train.algorithm.epsilon_high", low, "epsilon")
    elif draft.get(loss) in ("dapo", "bnpo") and high != low:
        kind = "dapo"
    draft.set(KIND, kind, *keys)
    if kind == "grpo":
        average = "sequence_mean" if draft.get(loss) == "grpo" else "token_mean"
        draft.set("train.algorithm.loss_type", average, loss)
    note = "TRL adds this to the standard deviation"
    draft.set("train.algorithm.std_epsilon", 1e-4, note=note)
    if kind == "dr_grpo" and draft.settings[f"train.algorithm.{scale}"].value == "none":
        draft.drop(f"train.algorithm.{scale}", "as here")
    elif kind == "dr_grpo":
        differ(draft, "dr_grpo divides by no standard deviation here", scale)
    fit(draft)


def _rounds(draft: Draft, key: str, path: str) -> None:
    """Convert a number of updates to steps, which may have several updates."""
    if 0 < draft.real(key) < 1:
        draft.refuse(f"a number of steps: {path}", key)
        return
    updates = draft.settings[UPDATES].value
    note = f"of {updates} updates per step" if updates > 1 else ""
    draft.set(path, max(1, round(draft.number(key) / updates)), key, note=note)


def _length(draft: Draft) -> None:
    updates, total = draft.settings[UPDATES].value, draft.number("max_steps")
    if draft.asked.steps:
        draft.set("steps", None, "max_steps", "num_train_epochs")
        total = draft.asked.steps * updates
    elif total > 0:
        _rounds(draft, "max_steps", "steps")
        draft.ignore("max_steps overrides it", "num_train_epochs")
    else:
        epochs = draft.real("num_train_epochs")
        draft.set("epochs", whole := max(1, math.ceil(epochs)), "num_train_epochs")
        if epochs != whole:
            draft.refuse(f"only whole passes: {whole}", "num_train_epochs")
    if draft.get("save_strategy") == "steps":
        _rounds(draft, "save_steps", "checkpoint.every")
    else:
        draft.set("checkpoint.every", 0, "save_strategy", note="at the end only")
        if draft.get("save_strategy") != "no":
            draft.refuse("set the steps between two checkpoints: checkpoint.every", "save_strategy")
    key = "warmup_steps" if draft.real("warmup_steps") else "warmup_ratio"
    value = draft.real(key)
    if key == "warmup_steps" and value >= 1:
        warm_up(draft, draft.number(key), key, "updates, as here")
    elif value:
        warm_up(draft, math.ceil(value * total) if total > 0 else None, key, f"of {total} updates")


def _evaluation(draft: Draft) -> None:
    when, split, count = "eval_strategy", "dataset_test_split", "num_generations_eval"
    if not draft.asked.held_out and (draft.get(when) != "steps" or not draft.get("dataset_name")):
        if draft.get(when) not in ("no", False):
            draft.refuse("set eval.data, and the steps between two evaluations: eval.every", when)
        return
    draft.set("eval.data.path", draft.get("dataset_name"), "dataset_name", when)
    if draft.has("dataset_config"):
        draft.set("eval.data.options.name", draft.get("dataset_config"), "dataset_config")
    draft.set("eval.data.split", draft.get(split), split)
    _rounds(draft, "eval_steps" if draft.has("eval_steps") else "logging_steps", "eval.every")
    key = count if draft.has(count) else "num_generations"
    draft.set("eval.temperature", draft.get("temperature") or 1.0, "temperature")
    draft.set("eval.num_generations", draft.get(key), key)


def _rewards(draft: Draft) -> None:
    model, functions, weights = (draft.get(key) for key in _REWARDS)
    if draft.asked.reward:
        draft.set("rewards", None, *_REWARDS)
        return
    named = functions if isinstance(functions, list) else [functions]
    rewards = [(_REWARDS[0], model)] * bool(model) + [(_REWARDS[1], each) for each in named]
    for place, (key, name) in enumerate(rewards):
        function = str(name) if key == _REWARDS[0] else _function(draft, str(name))
        draft.set(f"rewards.{place}.function", function, key)
        if isinstance(weights, list) and place < len(weights):
            draft.set(f"rewards.{place}.weight", weights[place], _REWARDS[2])
    if model:
        draft.warnings.append(f"rewards: '{model}' must be a folder: download the model first")


def _function(draft: Draft, name: str) -> str:
    """A reward function's path: TRL's ``module.name`` is ``module:name`` here."""
    module, _, last = name.rpartition(".")
    if last in ("accuracy_reward", "accuracy") and module in ("", "trl.rewards"):
        draft.warnings.append(
            f"rewards: 'math' stands for {last}: both use math-verify, but 'math' looks at the "
            "last \\boxed{} or final answer"
        )
        return "math"
    if last in ("think_format_reward", "reasoning_accuracy_reward") and not module:
        module = "trl.rewards"
    if module.startswith("trl."):
        draft.warnings.append(f"rewards: {last} is imported from TRL, which must be installed")
    if ":" in name or "/" in name:
        return name
    if not module:
        draft.warnings.append(
            f"rewards: '{name}' is known only to the script that read this file: write the "
            f"function '{name}' into rewards.py"
        )
    return f"{module or 'rewards.py'}:{last}"


def _correction(draft: Draft) -> None:
    """Importance weights, a default of GRPOTrainer if vLLM samples."""
    on, mode, low = (f"{_WEIGHTS}{name}" for name in ("correction", "mode", "clip_min"))
    high = f"{_WEIGHTS}cap" if draft.has(f"{_WEIGHTS}cap") else f"{_WEIGHTS}clip_max"
    if not draft.get("use_vllm"):
        return
    if draft.get("trainer") == "RLOOTrainer" or not draft.get(on):
        given = (key for key in draft.given if key.startswith(_WEIGHTS))
        draft.ignore("there are no importance weights", *given)
        return
    level, _, kind = draft.known(mode, {each: each for each in _MODES}).partition("_")
    if high in draft.given and not draft.has(high):
        draft.refuse(f"ratios need an upper bound: {CORRECTION}.high", mode, high)
        return
    if kind == "truncate" and draft.has(low):
        draft.refuse("low weights stay as they are", low)
    least = draft.real(low) if kind == "mask" and draft.has(low) else 0.0
    keys = (*([on] * (on in draft.given)), mode, *([low] * bool(least)), high)
    correct(draft, kind, level, least, draft.real(high), *keys)


def _devices(draft: Draft) -> None:
    """Devices of the launcher. Accelerate's own configuration is not in the file."""
    if draft.get("vllm_mode") == "server":
        draft.drop("engine.gpu_memory", "a share of the server's own GPUs")
    if not draft.get("use_vllm"):
        draft.ignore("use_vllm is off", *(key for key in draft.given if key.startswith("vllm_")))
    world = draft.asked.world or (draft.number(_WORLD) if draft.has(_WORLD) else 0)
    if draft.get("vllm_mode") != "server":
        nodes = machines(draft, "num_machines")
        keys, note = ((), f"--world {world}") if draft.asked.world else ((_WORLD,), "")
        if world and world % nodes == 0:
            draft.set("devices.per_node", world // nodes, *keys, note=note)
        size = draft.get(key := "vllm_tensor_parallel_size") or 1
        if draft.get("use_vllm") and size > 1 and world % size == 0:
            draft.set("engine.tensor_parallel", size, key)
            draft.set("trainer.kind", "fsdp", key, note="a replica holds whole engines")
            draft.set("trainer.shard", size, key)
    if world != 1:
        draft.warnings.append(
            "trainer.kind: each device has a whole replica. This file lacks accelerate's settings "
            "for ZeRO or FSDP: if they spread the model, set trainer.kind=fsdp"
        )


@cache
def table() -> Table:
    """TRL's keys. Rules that use steps or updates come after those that set them."""
    rules = (_start, _batch, _algorithm, _length, _evaluation, _rewards, _devices, _correction)
    return Table.load("TRL", rules)
