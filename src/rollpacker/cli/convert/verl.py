"""verl: what becomes of the keys of its PPO trainer (``verl.trainer.main_ppo``), version 0.9.

Defaults are those of ``verl/trainer/config/ppo_trainer.yaml``.
"""

from __future__ import annotations

from typing import Any

from rollpacker.cli.convert.table import Draft, Joint, Table, Unknown
from rollpacker.cli.convert.verl_layout import JOINTS as LAYOUT
from rollpacker.cli.convert.verl_loss import JOINTS as LOSS
from rollpacker.cli.convert.verl_rules import ACTOR, MODEL, ROLLOUT, RULES

_WHO = ("reward.custom_reward_function.", "custom_reward_function.")
_MANAGERS = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
_TEMPLATE = "data.apply_chat_template_kwargs."
_SAMPLING = f"{ROLLOUT}val_kwargs."
_TRACKERS = ("wandb", "trackio", "mlflow")
_LINES = ("console", "tensorboard", "file")


def _names(draft: Draft) -> None:
    key = f"{MODEL}path"
    if draft.asked.model:
        draft.set("model.path", draft.asked.model, "--model")
        draft.replace("--model", key)
    elif draft.get(key):
        draft.set("model.path", draft.get(key), draft.origin(key))
    draft.set(
        "model.dtype",
        "bfloat16",
        "verl's FSDP computes in bfloat16 and keeps float32 weights, as here",
    )
    key = "trainer.experiment_name"
    name = str(draft.get(key, "verl")).strip("/").replace("/", "-")
    draft.set("output", f"runs/{name}", draft.origin(key) if draft.get(key) else "a new folder")
    for start in _LORA:
        rank = draft.get(f"{MODEL}{start}rank", 0)
        if rank:
            alpha = draft.get(f"{MODEL}{start}alpha", _LORA[start])
            draft.set("model.lora_rank", rank, draft.origin(f"{MODEL}{start}rank"))
            draft.set("model.lora_alpha", alpha, draft.origin(f"{MODEL}{start}alpha", alpha))
    if "model.lora_rank" not in draft.settings:
        draft.ignore("no adapters", *(k for k in draft.given if k.startswith(_ADAPTERS)))


_ADAPTERS = tuple(f"{MODEL}{name}" for name in ("lora", "target_modules", "exclude_modules"))
_LORA = {"lora_": 16, "lora.": 32}
"""verl's two spellings of LoRA's keys, and their default alpha."""


def _files(value: Any) -> Any:
    """A path, or the list of several."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _data(draft: Draft) -> None:
    key = "data.train_files"
    if draft.asked.data:
        draft.set("data.path", draft.asked.data, "--data")
        draft.replace("--data", key)
    elif draft.get(key):
        draft.set("data.path", _files(draft.get(key)), draft.origin(key))
    count = draft.number("data.train_max_samples", -1)
    if count > 0:
        draft.set("data.size", count, f"{draft.origin('data.train_max_samples')}: the first rows")
    for name, ours, usual in (
        ("prompt_key", "input_key", "prompt"),
        ("reward_fn_key", "domain_key", "data_source"),
    ):
        value = draft.get(f"data.{name}", usual)
        if value != usual:
            draft.set(f"data.{ours}", value, draft.origin(f"data.{name}"))
        else:
            draft.ignore("verl's columns are found by themselves", f"data.{name}")
    for name, value in draft.given.items():
        if name.startswith(_TEMPLATE):
            to = f"model.chat_template_kwargs.{name.removeprefix(_TEMPLATE)}"
            draft.set(to, value, draft.origin(name))
    draft.set("data.drop_last", True, "verl drops the prompts that do not fill a batch")
    _prompts(draft)


def _prompts(draft: Draft) -> None:
    """Prompts that are too long: verl leaves them out, cuts them or stops."""
    longest = ("data.max_prompt_length", "data.filter_overlong_prompts", "data.truncation")
    if draft.get("data.filter_overlong_prompts", False):
        draft.set(
            "data.overlong",
            "skip",
            f"{draft.origin('data.filter_overlong_prompts')}: here those that leave no room for a "
            "response",
        )
        draft.refuse("no limit for prompts alone: leave longer ones out of the data", longest[0])
        draft.ignore("prompts are never cut here", longest[2])
    elif draft.get("data.truncation", "error") == "error":
        draft.ignore("verl stops at a longer prompt: the data has none", *longest)
    else:
        draft.refuse("prompts are never cut here: shorten those that are longer", *longest[::2])
        draft.ignore("off", longest[1])


def _evaluation(draft: Draft) -> None:
    key = "data.val_files"
    sampling = [each for each in draft.given if each.startswith(_SAMPLING)]
    if draft.asked.held_out:
        draft.set("eval.data.path", draft.asked.held_out, "--eval-data")
        draft.replace("--eval-data", key)
    elif draft.get(key):
        draft.set("eval.data.path", _files(draft.get(key)), draft.origin(key))
    else:
        draft.ignore("no problems to evaluate", *sampling, *_EVERY, "data.val_max_samples")
        return
    most = draft.number("data.val_max_samples", -1)
    if most > 0:
        draft.set("eval.data.size", most, draft.origin("data.val_max_samples"))
    every = max(0, draft.number("trainer.test_freq", -1))
    draft.set("eval.every", every, f"{draft.origin('trainer.test_freq', -1)}: 0 for never between")
    sampled = draft.get(f"{_SAMPLING}do_sample", False)
    heat = draft.get(f"{_SAMPLING}temperature", 0) if sampled else 0
    why = f"{draft.origin(f'{_SAMPLING}do_sample', False)}: greedy"
    if sampled:
        why = (
            f"{draft.origin(f'{_SAMPLING}temperature', 0)}, {draft.origin(f'{_SAMPLING}do_sample')}"
        )
    else:
        draft.ignore("do_sample is off", f"{_SAMPLING}temperature")
    draft.set("eval.temperature", heat, why)
    draft.set(
        "eval.num_generations", draft.get(f"{_SAMPLING}n", 1), draft.origin(f"{_SAMPLING}n", 1)
    )
    for name, off in (("top_p", (1,)), ("top_k", (-1, 0))):
        if sampled and draft.get(f"{_SAMPLING}{name}", off[0]) not in off:
            draft.refuse("evaluations sample from all tokens", f"{_SAMPLING}{name}")
        else:
            draft.ignore("all tokens, as here", f"{_SAMPLING}{name}")


_EVERY = ("trainer.test_freq", "trainer.val_before_train")


def _rewards(draft: Draft) -> None:
    start = next((each for each in _WHO if draft.get(f"{each}path")), "")
    options = {
        key: value
        for key, value in draft.given.items()
        if key.startswith(tuple(f"{each}reward_kwargs." for each in _WHO))
    }
    manager, name = draft.first(*_MANAGERS, default="naive")
    if name not in ("naive", "dapo", "batch"):
        draft.refuse("rewards are summed with their weights, in no other way", manager)
    else:
        draft.ignore("rewards are summed; dapo's punishment is the algorithm's here", *_MANAGERS)
    mine = [key for key in draft.given if key.startswith(_WHO) and ".overlong_buffer." not in key]
    if draft.asked.reward:
        draft.set("rewards.0.function", draft.asked.reward, "--reward")
        draft.replace("--reward", *mine)
    elif start:
        place = str(draft.get(f"{start}path")).removeprefix("pkg://")
        function = draft.get(f"{start}name", "compute_score")
        draft.set("rewards.0.function", f"{place}:{function}", draft.origin(f"{start}path"))
        for key, value in options.items():
            name = key.partition("reward_kwargs.")[2]
            draft.set(f"rewards.0.options.{name}", value, draft.origin(key))
    elif not any(isinstance(draft.given.get(f"{each}path"), Unknown) for each in _WHO):
        draft.set("rewards.0.function", "math", "verl chooses by data_source: see CHECK above")
        draft.warnings.append(
            "rewards: verl scores each row by its data_source; 'math' (math-verify) stands for "
            "gsm8k and MATH and differs in details (verl's gsm8k wants '#### 42'); for programs "
            "take 'code', for anything else a function: --reward"
        )
        draft.ignore("no file of one's own: verl's rewards by data_source", *mine)


def _end(draft: Draft) -> None:
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    if draft.asked.steps:
        draft.set("steps", draft.asked.steps, "--steps")
        draft.replace("--steps", steps, epochs)
    elif draft.get(steps):
        draft.set("steps", draft.get(steps), f"{draft.origin(steps)}: rounds, as here")
        draft.ignore("total_training_steps goes before", epochs)
    else:
        draft.set("epochs", draft.get(epochs, 30), draft.origin(epochs, 30))
    every = max(0, draft.number("trainer.save_freq", -1))
    draft.set(
        "checkpoint.every", every, f"{draft.origin('trainer.save_freq', -1)}: 0 for the end only"
    )
    key = "trainer.max_actor_ckpt_to_keep"
    if draft.get(key):
        keep = max(2, draft.number(key, 2))
        draft.set("checkpoint.keep", keep, f"{draft.origin(key)}: 2 at least")
    key = "trainer.logger"
    loggers = draft.get(key, [])
    loggers = loggers if isinstance(loggers, list) else [loggers]
    known = [each for each in loggers if each in _TRACKERS]
    if known:
        draft.set("trackers", known, f"{draft.origin(key)}: lines and TensorBoard are always there")
    elif all(each in _LINES for each in loggers):
        draft.ignore("lines and TensorBoard are always there", key)
    else:
        draft.refuse(f"trackers here: {', '.join(_TRACKERS)}", key)


JOINTS = (
    Joint(
        (
            f"{MODEL}path",
            "trainer.experiment_name",
            *(f"{MODEL}{start}{name}" for start in _LORA for name in ("rank", "alpha")),
        ),
        _names,
    ),
    Joint(
        (
            "data.train_files",
            "data.train_max_samples",
            "data.prompt_key",
            "data.reward_fn_key",
            "data.max_prompt_length",
            "data.filter_overlong_prompts",
            "data.truncation",
        ),
        _data,
    ),
    *LOSS,
    Joint(
        (
            "data.val_files",
            "data.val_max_samples",
            "trainer.test_freq",
            *(f"{_SAMPLING}{name}" for name in ("do_sample", "temperature", "n", "top_p", "top_k")),
        ),
        _evaluation,
    ),
    Joint((*_MANAGERS, *(f"{each}{name}" for each in _WHO for name in ("path", "name"))), _rewards),
    *LAYOUT,
    Joint(
        tuple(
            f"trainer.{name}"
            for name in (
                "total_training_steps",
                "total_epochs",
                "save_freq",
                "max_actor_ckpt_to_keep",
                "logger",
            )
        ),
        _end,
    ),
)

TABLE = Table("verl", RULES, JOINTS)
"""verl's keys."""

MARKS = ("actor_rollout_ref", "algorithm", "data", "trainer")
"""Sections by which its configurations are recognised; two of them, or the first."""

__all__ = ["ACTOR", "MARKS", "TABLE"]
