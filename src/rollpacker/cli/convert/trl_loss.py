"""TRL: the loss and the update, where several keys together say what happens."""

from __future__ import annotations

import math
from typing import Any

from rollpacker.cli.convert.table import Draft, Joint

_DEVICE, _TOGETHER = "per_device_train_batch_size", "gradient_accumulation_steps"
_EACH, _ALL = "steps_per_generation", "generation_batch_size"
_WORLD = "num_processes"
_LOSSES = {"dapo": "grpo", "bnpo": "grpo", "grpo": "grpo", "dr_grpo": "dr_grpo"}
_SCALES = {True: "group", False: "none"}
_WARM, _WARM_SHARE = "warmup_steps", "warmup_ratio"
_SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
}
_UPDATES = "train.updates_per_step"


def _leaves_out(draft: Draft) -> bool:
    """Whether it is RLOO, which only a script says."""
    return draft.get("trainer") == "RLOOTrainer"


def _batch(draft: Draft) -> None:
    """TRL counts responses on each process; a step here counts prompts."""
    world = draft.asked.world or draft.number(_WORLD, 1, 1)
    if draft.asked.world:
        draft.replace("--world", _WORLD)
    elif draft.get(_WORLD) is None:
        draft.warnings.append(
            "rollout.prompts_per_step: one process is assumed; of how many the batch is, the file "
            "does not say: --world N"
        )
    device, together = draft.number(_DEVICE, 8, 1), draft.number(_TOGETHER, 1, 1)
    per, per_why = _passes(draft, device * world, together)
    usual = 2 if _leaves_out(draft) else 8
    count = draft.number("num_generations", usual, 1)
    # Rounds that are shorter than an update are sampled with the same weights: one step here.
    responses = device * world * max(per, together)
    if responses % count:
        raise ValueError(
            f"{draft.file}: {responses} responses of a batch ({draft.origin(_DEVICE, 8)} x {world} "
            f"processes x {max(per, together)}) are no multiple of num_generations={count}"
            + ("" if draft.asked.world else ": give --world N, the number of processes")
        )
    processes = draft.origin(_WORLD) if draft.get(_WORLD) else f"{world} processes"
    times = per_why if per > together else draft.origin(_TOGETHER, 1)
    group = draft.origin("num_generations", usual)
    why = f"{draft.origin(_DEVICE, 8)} x {processes} x {times} / {group}"
    draft.set("rollout.prompts_per_step", responses // count, why)
    draft.set("rollout.num_generations", count, group)
    updates = max(1, per // together)
    draft.set(_UPDATES, updates, f"{per_why} / {draft.origin(_TOGETHER, 1)}, at least 1")
    if per > together and per % together:
        draft.refuse(f"mini-batches are equal here: {updates} updates of a step", _EACH, _ALL)
    if draft.number("num_iterations", 1) > 1:
        draft.refuse("each response is used for one update only", "num_iterations")


def _passes(draft: Draft, at_once: int, together: int) -> tuple[int, str]:
    """Backward passes between two rounds of responses, and why."""
    whole = draft.get(_ALL)
    if whole is not None:
        if draft.number(_ALL, 1, 1) % at_once:
            raise ValueError(
                f"{draft.file}: {draft.origin(_ALL)} is no multiple of {at_once} responses at once"
            )
        return draft.number(_ALL, 1) // at_once, f"{draft.origin(_ALL)} / {at_once}"
    if draft.get(_EACH) is not None:
        return draft.number(_EACH, 1, 1), draft.origin(_EACH)
    return together, draft.origin(_TOGETHER, 1)


def _algorithm(draft: Draft) -> None:
    if _leaves_out(draft):
        _leave_one_out(draft)
        return
    loss = str(draft.get("loss_type", "dapo"))
    if loss not in _LOSSES:
        raise draft.no_counterpart("loss_type", "dapo", ", ".join(_LOSSES))
    kind = _LOSSES[loss]
    low = draft.get("epsilon", 0.2)
    high = draft.get("epsilon_high", low)
    why = draft.origin("loss_type", "dapo")
    if draft.get("importance_sampling_level", "token") == "sequence":
        why = f"{draft.origin('importance_sampling_level')}, {why}"
        if loss != "grpo":
            draft.refuse("gspo averages over responses, as loss_type=grpo does", "loss_type")
        kind = "gspo"
    elif kind == "grpo" and loss != "grpo" and high != low:
        kind = "dapo"
    draft.set("train.algorithm.kind", kind, why)
    if kind == "grpo":
        ours = "sequence_mean" if loss == "grpo" else "token_mean"
        draft.set("train.algorithm.loss_type", ours, draft.origin("loss_type", "dapo"))
    _scale(draft, kind)
    _clip(draft, kind, low, high)


def _clip(draft: Draft, kind: str, low: Any, high: Any) -> None:
    draft.set("train.algorithm.epsilon", low, draft.origin("epsilon", 0.2))
    if kind in ("dapo", "gspo"):
        key = draft.first("epsilon_high", "epsilon")[0]
        key = key if draft.get(key) is not None else "epsilon"
        draft.set("train.algorithm.epsilon_high", high, draft.origin(key, 0.2))
    elif high != low:
        draft.refuse(f"{kind} has one clip range for both sides here: {low}", "epsilon_high")
    if kind == "gspo":
        draft.refuse("gspo has no dual clip here", "delta")
    elif draft.get("delta") is not None:
        draft.set("train.algorithm.delta", draft.get("delta"), draft.origin("delta"))


def _leave_one_out(draft: Draft) -> None:
    draft.set("train.algorithm.kind", "rloo", "trainer=RLOOTrainer")
    low = draft.get("epsilon", 0.2)
    _clip(draft, "rloo", low, draft.get("epsilon_high", low))


def _scale(draft: Draft, kind: str) -> None:
    """What advantages are divided by."""
    given = draft.get("scale_rewards", "group")
    scale = _SCALES.get(given, given) if isinstance(given, bool) else given
    if scale not in ("group", "batch", "none"):
        raise draft.no_counterpart("scale_rewards", "group", "group, batch, none")
    if kind != "dr_grpo":
        why = draft.origin("scale_rewards", "group")
        draft.set("train.algorithm.scale_rewards", scale, why)
        draft.set("train.algorithm.std_epsilon", 1e-4, "TRL adds this to the standard deviation")
    elif scale != "none":
        text = "dr_grpo divides by no standard deviation here"
        draft.refuse(text, "scale_rewards")
        if draft.get("scale_rewards") is None:
            draft.warnings.append(f"train.algorithm: {text}; TRL's default is that of the group")


def _divergence(draft: Draft) -> None:
    key, fix = "beta", "use_bias_correction_kl"
    usual = 0.05 if _leaves_out(draft) else 0.0
    beta = draft.get(key, usual)
    if beta and _leaves_out(draft):
        draft.set("train.beta", beta, draft.origin(key, usual))
        draft.warnings.append(
            "train.beta: TRL's RLOO puts the KL into a response's reward, here it is in the loss"
        )
    elif beta:
        draft.set("train.beta", beta, draft.origin(key, usual))
        draft.set(
            "train.kl_bias_correction",
            draft.get(fix, True),
            draft.origin(fix, True) + ("" if draft.get(fix) is not None else " (older TRL: false)"),
        )
    else:
        draft.ignore("beta is 0: no reference model", key, fix)


def _optimizer(draft: Draft) -> None:
    draft.set(
        "train.learning_rate", draft.get("learning_rate", 1e-6), draft.origin("learning_rate", 1e-6)
    )
    key = "lr_scheduler_type"
    schedule = _SCHEDULES.get(str(draft.get(key, "linear")))
    if schedule is None:
        near = "cosine" if "cosine" in str(draft.get(key)) else "constant"
        draft.refuse(f"constant, linear or cosine to 0: '{near}' is taken", key)
        schedule = near
    draft.set("train.lr_scheduler_type", schedule, draft.origin(key, "linear"))
    _warm_up(draft)


def _warm_up(draft: Draft) -> None:
    """A number of updates; as a share of all only where their number is known."""
    key = _WARM if draft.real(_WARM, 0) else _WARM_SHARE
    value, total = draft.real(key, 0), draft.number("max_steps", -1)
    all_why = draft.origin("max_steps") if total > 0 else ""
    if draft.asked.steps:
        total = draft.asked.steps * draft.settings[_UPDATES].value
        all_why = f"{total} updates (--steps)"
    if not value:
        draft.ignore("no warm-up", _WARM, _WARM_SHARE)
        return
    if key == _WARM and value >= 1:
        count, why = draft.number(key, 0), f"{draft.origin(key)}: updates, as here"
    elif total > 0:
        count = math.ceil(value * total)
        why = f"{draft.origin(key)} of {all_why}"
    else:
        draft.refuse(
            "how many steps there will be is not known: --steps N, or train.warmup_steps", key
        )
        return
    draft.set("train.warmup_steps", count, why)
    draft.set("train.warmup_from_zero", True, "as in transformers")


def rounds(draft: Draft, key: str, to: str, default: int | float) -> None:
    """A number of updates as a number of steps, which may have several updates."""
    value, updates = draft.real(key, default), draft.settings[_UPDATES].value
    if 0 < value < 1:
        draft.refuse(f"a number of steps: {to}", key)
        return
    count = max(1, round(draft.whole(key, value) / updates))
    draft.set(to, count, draft.origin(key, default) + (f" / {updates} updates" * (updates > 1)))


def _end(draft: Draft) -> None:
    if draft.asked.steps:
        draft.set("steps", draft.asked.steps, "--steps")
        draft.replace("--steps", "max_steps", "num_train_epochs")
    elif draft.number("max_steps", -1) > 0:
        rounds(draft, "max_steps", "steps", 1)
        draft.ignore("max_steps goes before", "num_train_epochs")
    else:
        epochs = draft.real("num_train_epochs", 3)
        whole = max(1, math.ceil(epochs))
        part = "" if whole == epochs else ": whole ones only"
        draft.set("epochs", whole, draft.origin("num_train_epochs", 3) + part)
        if part:
            draft.refuse(f"whole passes only: {whole} are made", "num_train_epochs")
        draft.ignore("num_train_epochs decides", "max_steps")
    strategy = str(draft.get("save_strategy", "steps")).lower()
    if strategy == "steps":
        rounds(draft, "save_steps", "checkpoint.every", 500)
    else:
        draft.set("checkpoint.every", 0, f"{draft.origin('save_strategy')}: at the end only")
        draft.ignore("save_strategy decides", "save_steps")
        if strategy != "no":
            draft.refuse("checkpoints are so many steps apart: checkpoint.every", "save_strategy")
    key = "save_total_limit"
    if draft.get(key):
        draft.set(
            "checkpoint.keep", max(2, draft.number(key, 2)), f"{draft.origin(key)}: 2 at least"
        )


JOINTS = (
    Joint((_DEVICE, _TOGETHER, _EACH, _ALL, _WORLD, "num_generations", "num_iterations"), _batch),
    Joint(
        (
            "trainer",
            "loss_type",
            "epsilon",
            "epsilon_high",
            "delta",
            "importance_sampling_level",
            "scale_rewards",
        ),
        _algorithm,
    ),
    Joint(("beta", "use_bias_correction_kl"), _divergence),
    Joint(("learning_rate", "lr_scheduler_type", _WARM, _WARM_SHARE), _optimizer),
    Joint(
        ("max_steps", "num_train_epochs", "save_strategy", "save_steps", "save_total_limit"), _end
    ),
)
"""In this order: steps are counted in the updates of the batch."""
