"""TRL: what becomes of the keys of ``trl grpo`` and of ``GRPOConfig``, version 1.16.

Defaults are those of ``trl.GRPOConfig`` and of transformers' ``TrainingArguments``.
"""

from __future__ import annotations

from typing import Any, cast

from rollpacker.cli.convert.table import Draft, Joint, Table
from rollpacker.cli.convert.trl_engine import JOINTS as ENGINE
from rollpacker.cli.convert.trl_loss import JOINTS as LOSS
from rollpacker.cli.convert.trl_loss import rounds
from rollpacker.cli.convert.trl_rules import RULES

_TRACKERS = ("wandb", "trackio", "mlflow")
_LORA = ("use_peft", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
_TYPES = ("bf16", "fp16", "dtype", "torch_dtype", "model_init_kwargs")
_MATH = ("accuracy_reward", "accuracy")
"""TRL's and open-r1's names of a reward by math-verify."""
_OF_TRL = ("think_format_reward", "reasoning_accuracy_reward")
_SETS = ("dataset_name", "dataset_config", "dataset_train_split", "datasets")


def _model(draft: Draft) -> None:
    key = "model_name_or_path"
    if draft.asked.model:
        draft.set("model.path", draft.asked.model, "--model")
        draft.replace("--model", key)
    elif draft.get(key):
        draft.set("model.path", draft.get(key), draft.origin(key))
    key = "output_dir"
    name = str(draft.get(key, "trl")).rstrip("/").rpartition("/")[2] or "trl"
    # A folder of its own: TRL's checkpoints have the same names as ours.
    draft.set("output", f"runs/{name}", draft.origin(key))
    template = draft.get("chat_template_kwargs", {})
    if template:
        draft.set("model.chat_template_kwargs", template, draft.origin("chat_template_kwargs"))
    _type(draft)
    _adapters(draft)


def _type(draft: Draft) -> None:
    """What forward and backward compute in."""
    kwargs = draft.get("model_init_kwargs", {})
    inner = kwargs.get("dtype", kwargs.get("torch_dtype")) if isinstance(kwargs, dict) else None
    key, weights = draft.first("dtype", "torch_dtype", default=inner or "float32")
    weights = str(weights).removeprefix("torch.")
    if draft.get("fp16", False) or weights == "float16":
        draft.refuse("bfloat16 or float32: model.dtype", "fp16", key)
    half = draft.get("bf16", True) or weights == "bfloat16"
    why = ", ".join(draft.origin(each) for each in _TYPES if draft.get(each) is not None)
    draft.set(
        "model.dtype",
        "bfloat16" if half else "float32",
        (why or draft.origin("bf16", True)) + (": with float32 master weights" if half else ""),
    )
    if isinstance(kwargs, dict) and set(cast(dict[str, Any], kwargs)) - _LOADING:
        draft.refuse("the model is loaded as its folder says", "model_init_kwargs")


_LOADING = {"dtype", "torch_dtype", "attn_implementation", "device_map", "use_cache"}
"""Arguments of ``from_pretrained`` that change no results, or that ``_type`` reads."""


def _adapters(draft: Draft) -> None:
    if not draft.get("use_peft", False):
        draft.ignore("use_peft is off", *_LORA)
        return
    rank = draft.origin("lora_r", 16)
    draft.set("model.lora_rank", draft.get("lora_r", 16), f"{draft.origin('use_peft')}, {rank}")
    draft.set("model.lora_alpha", draft.get("lora_alpha", 32), draft.origin("lora_alpha", 32))
    modules = draft.get("lora_target_modules")
    if modules not in ("all-linear", ["all-linear"]):
        text = "adapters are on all linear layers"
        draft.refuse(text, "lora_target_modules")
        if modules is None:
            draft.warnings.append(f"model.lora_rank: {text}; peft's default is some of them")
    if draft.get("lora_dropout", 0.05):
        draft.refuse("adapters have no dropout", "lora_dropout")


def _data(draft: Draft) -> None:
    if draft.asked.data:
        draft.set("data.path", draft.asked.data, "--data")
        draft.replace("--data", *_SETS)
    elif draft.get("datasets"):
        draft.ignore("datasets goes before", *_SETS[:3])
        _mixture(draft, draft.get("datasets"))
    else:
        for key, to in zip(_SETS, _OURS, strict=False):
            if draft.get(key):
                draft.set(to, draft.get(key), draft.origin(key))
    draft.set("data.drop_last", True, "TRL drops the prompts that do not fill a batch")


_OURS = ("data.path", "data.options.name", "data.split")


def _mixture(draft: Draft, sets: Any) -> None:
    """``datasets`` of the configuration file, of which a run here has one."""
    parts = cast(list[Any], sets) if isinstance(sets, list) else []
    first = cast(dict[str, Any], parts[0]) if parts and isinstance(parts[0], dict) else {}
    known = {"path": "data.path", "name": "data.options.name", "split": "data.split"}
    why = draft.origin("datasets")
    for name, to in known.items():
        if first.get(name):
            draft.set(to, first[name], why)
    if len(parts) != 1 or set(first) - set(known):
        text = "one data set, by path, name and split: put others into one file"
        draft.refuse(f"{text}; the first is taken", "datasets")


def _evaluation(draft: Draft) -> None:
    keys = ("dataset_test_split", "eval_steps", "num_generations_eval")
    when = draft.get("eval_strategy", draft.get("evaluation_strategy", "no"))
    if draft.asked.held_out:
        draft.set("eval.data.path", draft.asked.held_out, "--eval-data")
        draft.replace("--eval-data", keys[0])
    elif when in ("no", False) or not draft.get("dataset_name"):
        draft.ignore("no evaluation", *keys, *_WHEN)
        return
    else:
        name, split = draft.origin("dataset_name"), draft.origin(keys[0], "test")
        strategy = draft.origin(draft.first(*_WHEN)[0])
        draft.set("eval.data.path", draft.get("dataset_name"), f"{name}, {strategy}")
        if draft.get("dataset_config"):
            key = "dataset_config"
            draft.set("eval.data.options.name", draft.get(key), draft.origin(key))
        draft.set("eval.data.split", draft.get(keys[0], "test"), split)
    if when == "epoch":
        draft.refuse("evaluations are so many steps apart: eval.every", *_WHEN)
    else:
        rounds(draft, keys[1], "eval.every", draft.get("logging_steps", 10))
    draft.set(
        "eval.temperature",
        draft.get("temperature", 1.0),
        f"{draft.origin('temperature', 1.0)}: as in training",
    )
    usual = draft.settings["rollout.num_generations"]
    count = draft.get(keys[2], usual.value)
    why = draft.origin(keys[2]) if draft.get(keys[2]) else f"{usual.why}: as in training"
    draft.set("eval.num_generations", count, why)


_WHEN = ("eval_strategy", "evaluation_strategy")


def _rewards(draft: Draft) -> None:
    functions, weights = draft.get("reward_funcs", []), draft.get("reward_weights")
    named = functions if isinstance(functions, list) else [functions]
    model = draft.get("reward_model_name_or_path")
    keys = ("reward_model_name_or_path", "reward_funcs", "reward_weights")
    if draft.asked.reward:
        draft.set("rewards.0.function", draft.asked.reward, "--reward")
        draft.replace("--reward", *keys)
        return
    rewards = [(keys[0], model)] * bool(model) + [(keys[1], each) for each in named]
    for place, (key, name) in enumerate(rewards):
        function = str(name) if key == keys[0] else _function(draft, str(name))
        draft.set(f"rewards.{place}.function", function, f"{key}={name}")
        if isinstance(weights, list) and place < len(weights):
            draft.set(f"rewards.{place}.weight", weights[place], draft.origin("reward_weights"))
    if model:
        draft.warnings.append(f"rewards: '{model}' must be a folder: download the model first")


def _function(draft: Draft, name: str) -> str:
    """A reward function's path here: ``module.name`` is TRL's way to say ``module:name``."""
    module, dot, last = name.rpartition(".")
    if last in _MATH and module in ("", "trl.rewards"):
        draft.warnings.append(
            f"rewards: 'math' stands for {last}: both ask math-verify, but 'math' looks at the "
            "last \\boxed{} or final answer"
        )
        return "math"
    if last in _OF_TRL and not module:
        module = "trl.rewards"
    if module.startswith("trl."):
        draft.warnings.append(f"rewards: {last} is imported from TRL, which must be installed")
    if ":" in name or "/" in name:
        return name
    if not dot and not module:
        draft.warnings.append(
            f"rewards: '{name}' is a name that only the script knows which read this file: write "
            f"the function '{name}' into rewards.py"
        )
        module = "rewards.py"
    return f"{module}:{last}"


def _trackers(draft: Draft) -> None:
    key = "report_to"
    given = draft.get(key, [])
    given = given if isinstance(given, list) else [given]
    known = [each for each in given if each in _TRACKERS]
    if known:
        draft.set("trackers", known, f"{draft.origin(key)}: lines and TensorBoard are always there")
    elif all(each in ("none", "tensorboard", "all") for each in given):
        draft.ignore("lines and TensorBoard are always there", key)
    else:
        draft.refuse(f"trackers here: {', '.join(_TRACKERS)}", key)


JOINTS = (
    Joint(
        ("model_name_or_path", "output_dir", "chat_template_kwargs", *_TYPES, *_LORA),
        _model,
    ),
    Joint(_SETS, _data),
    *LOSS,
    *ENGINE,
    Joint(("dataset_test_split", "eval_steps", "num_generations_eval", *_WHEN), _evaluation),
    Joint(("reward_model_name_or_path", "reward_funcs", "reward_weights"), _rewards),
    Joint(("report_to",), _trackers),
)

TABLE = Table("TRL", RULES, JOINTS)
"""TRL's keys."""

MARKS = (
    "reward_funcs",
    "reward_model_name_or_path",
    "num_generations",
    "max_completion_length",
    "generation_batch_size",
)
"""Keys by which its configurations for GRPO are recognised."""
