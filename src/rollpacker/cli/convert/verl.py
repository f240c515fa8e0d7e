"""verl: rules for several keys of its PPO trainer. The others are in ``verl.yaml``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import Any, cast

from rollpacker.cli.convert.table import (
    CORRECTION,
    KIND,
    UPDATES,
    Draft,
    Setting,
    Table,
    Unknown,
    correct,
    differ,
    fit,
    machines,
    warm_up,
    whole_batch,
)

MARKS = ("actor_rollout_ref", "algorithm", "data", "trainer")
"""Sections that mark its configurations: two of them, or the first."""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_WEIGHTS, _EARLIER = "algorithm.rollout_correction.", "algorithm.rollout_is"
_LEVELS = {each: each for each in ("token", "sequence", "geometric")}
_WHO = ("reward.custom_reward_function.", "custom_reward_function.")
_ESTIMATORS = {
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus_baseline": "reinforce_pp",
}
_AVERAGES = {
    "token-mean": "grpo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
_AT_ONCE = 16384  # verl's default for `ppo_max_token_len_per_gpu`, tokens at a time on a GPU
_OURS = {"rloo": "seq-mean-token-sum", "reinforce_pp": "token-mean", "gspo": "seq-mean-token-mean"}
"""verl's names for the averages of our algorithms that have only one."""


def _start(draft: Draft) -> None:
    draft.set("model.dtype", "bfloat16", note="verl's FSDP computes in it, over float32 weights")
    draft.set("data.drop_last", True, note="verl drops the prompts that do not fill a batch")
    draft.settings.setdefault("output", Setting("runs/verl", "a new folder"))
    if "steps" in draft.settings:
        draft.drop("epochs", "total_training_steps overrides it")
    for start in ("lora_", "lora."):
        rank, alpha = (f"actor_rollout_ref.model.{start}{name}" for name in ("rank", "alpha"))
        if draft.get(rank):
            draft.set("model.lora_rank", draft.get(rank), rank)
            draft.set("model.lora_alpha", draft.get(alpha), alpha)
    betas = draft.get(pair := f"{_ACTOR}optim.betas")
    if isinstance(betas, list) and len(cast(list[Any], betas)) == 2:
        for name, beta in zip(("adam_beta1", "adam_beta2"), cast(list[Any], betas), strict=True):
            draft.set(f"train.{name}", beta, pair)
    sample, heat = f"{_ROLLOUT}val_kwargs.do_sample", f"{_ROLLOUT}val_kwargs.temperature"
    if draft.get(sample):
        draft.set("eval.temperature", draft.get(heat), heat, sample)
    else:
        draft.set("eval.temperature", 0, sample, note="greedy")


def _rewards(draft: Draft) -> None:
    start = next((each for each in _WHO if draft.get(f"{each}path")), "")
    if draft.asked.reward:
        draft.set("rewards", None, *(key for key in draft.given if key.startswith(_WHO)))
    elif start:
        path, name, options = f"{start}path", f"{start}name", f"{start}reward_kwargs."
        file = str(draft.get(path)).removeprefix("pkg://")
        draft.set("rewards.0.function", f"{file}:{draft.get(name)}", path, name)
        for key in [each for each in draft.given if each.startswith(options)]:
            draft.set(f"rewards.0.options.{key.removeprefix(options)}", draft.given[key], key)
    elif draft.get(on := "reward_model.enable") and draft.get(path := "reward_model.model.path"):
        draft.set("rewards.0.function", draft.get(path), on, path)
        draft.warnings.append(f"rewards: {draft.origin(path)} must be a folder: download it first")
    elif not any(isinstance(draft.given.get(f"{each}path"), Unknown) for each in _WHO):
        if draft.get(metric := "algorithm.filter_groups.metric") == "acc":
            draft.ignore("rewards of 'math' are 1 and 0, right and wrong", metric)
        draft.set("rewards.0.function", "math", note="verl chooses by data_source: see CHECK above")
        draft.warnings.append(
            "rewards: verl scores each row by its data_source. 'math' (math-verify) stands for "
            "gsm8k and MATH and differs in details (verl's gsm8k wants '#### 42'). For programs "
            "use 'code', for anything else a function: --reward"
        )


def _algorithm(draft: Draft) -> None:
    """The kind by estimator, loss and average. Then remove options that it does not have."""
    estimator, mode = "algorithm.adv_estimator", f"{_ACTOR}policy_loss.loss_mode"
    average, keys = f"{_ACTOR}loss_agg_mode", (estimator,)
    if draft.get(estimator) == "gae":
        raise ValueError(
            f"{draft.file}: {draft.origin(estimator)} trains a critic, unlike all "
            f"algorithms here: to compare the responses of a prompt, set {estimator}=grpo and "
            f"{_ROLLOUT}n=8 there, and translate it again"
        )
    kind, how, wide = draft.known(estimator, _ESTIMATORS), str(draft.get(average)), _is_dapo(draft)
    if draft.get(old := f"{_ACTOR}use_token_level_loss") is False:
        average, how = old, "seq-mean-token-mean"
    if draft.known(mode, {"vanilla": "", "gspo": "gspo"}):
        draft.known(mode, {"gspo": ""} if kind == "grpo" else {"vanilla": ""})
        kind, keys = "gspo", (mode, estimator)
        draft.drop("train.algorithm.delta", "verl's gspo has no dual clip, as here")
    elif kind == "grpo" and average != old:
        kind, keys = draft.known(average, _AVERAGES), (estimator, average)
    if kind == "grpo" and how == "token-mean" and wide:
        kind = "dapo"
    draft.set(KIND, kind, *keys)
    if kind == "grpo":
        ours = "token_mean" if how == "token-mean" else "sequence_mean"
        draft.set("train.algorithm.loss_type", ours, average)
    elif how != _OURS.get(kind, how):
        differ(draft, f"{kind} averages as {_OURS[kind]} does", average)
    if kind == "dr_grpo" and not draft.has(scale := "algorithm.norm_adv_by_std_in_grpo"):
        differ(draft, "dr_grpo divides by no standard deviation, but verl does by default", scale)
    fit(draft)


def _is_dapo(draft: Draft) -> bool:
    """Whether it clips more widely above than below, or penalizes long responses."""
    for name, ours in (("low", "epsilon"), ("high", "epsilon_high")):
        key, both = f"{_ACTOR}clip_ratio_{name}", f"{_ACTOR}clip_ratio"
        if key in draft.given and not draft.has(key):  # null overrides the default
            draft.set(f"train.algorithm.{ours}", draft.get(both), both)
    low, high = (draft.settings.get(f"train.algorithm.{n}") for n in ("epsilon", "epsilon_high"))
    for key in [each for each in draft.given if each.endswith(".max_resp_len")]:
        if draft.get(key) != draft.get("data.max_response_length"):
            draft.refuse("the penalty ends at the longest response", key)
    if any(draft.get(key) for key in draft.given if fnmatchcase(key, "*overlong_buffer*.enable")):
        return True
    for name in ("buffer", "penalty"):
        draft.drop(f"train.algorithm.overlong_{name}", "no penalty for long responses")
    return bool(low and high and low.value != high.value)


def _batch(draft: Draft) -> None:
    batch, mini = "data.train_batch_size", f"{_ACTOR}ppo_mini_batch_size"
    batch = _drawn(draft, batch)
    prompts, part = draft.number(batch, 1), draft.number(mini, 1)
    if batch in draft.refused or mini in draft.refused:
        draft.set(UPDATES, 1, note="the file does not contain the whole batch: set it by hand")
    else:
        updates = -(-prompts // part)
        notes = filter(None, (f"{prompts} / {part}", whole_batch(updates)))
        draft.set(UPDATES, updates, batch, mini, note=": ".join(notes))
        if prompts % part:
            draft.refuse(f"mini-batches are equal here: {updates} of them", mini)
    tokens, micro = f"{_ACTOR}ppo_max_token_len_per_gpu", f"{_ACTOR}ppo_micro_batch_size_per_gpu"
    longest = draft.number("data.max_response_length") + (
        draft.get("data.max_prompt_length") or 512
    )
    if draft.get(dynamic := f"{_ACTOR}use_dynamic_bsz"):
        draft.set("train.micro_batch_tokens", draft.number(tokens), dynamic, tokens)
    elif draft.get(micro):
        note = f"times {longest} tokens of the longest prompt and response"
        worst, most = draft.number(micro) * longest, max(_AT_ONCE, longest)
        if worst > most:
            note += f", {worst} at worst: {most} at a time make the same update in less memory"
        draft.set("train.micro_batch_tokens", min(worst, most), micro, note=note)
    if not draft.get(f"{_ACTOR}use_kl_loss"):
        draft.drop("train.beta", "use_kl_loss is off")
        draft.ignore("use_kl_loss is off", f"{_ACTOR}kl_loss_type")
    draft.set("train.kl_bias_correction", False, note="verl's KL loss has no ratio")


def _drawn(draft: Draft, batch: str) -> str:
    """The key for a step's number of prompts. verl draws ``gen_batch_size`` at a time.

    It trains on all of them, unless it filters groups: then it draws until it has ``batch``.
    """
    drawn, tries = "data.gen_batch_size", "algorithm.filter_groups.max_num_gen_batches"
    if not draft.has(drawn):
        return batch
    if not draft.get("algorithm.filter_groups.enable"):
        draft.set("rollout.prompts_per_step", draft.number(drawn, 1), drawn)
        draft.ignore(f"{drawn} overrides it", batch)
        return drawn
    draft.ignore("after the first draw, as many prompts are drawn as groups are missing", drawn)
    if draft.has(tries) and draft.number(tries) > 0:
        most = -(-draft.number(tries) * draft.number(drawn, 1) // draft.number(batch, 1))
        note = "for as many prompts at most, including the first draw"
        draft.set("rollout.dynamic_sampling.max_draws", max(1, most - 1), tries, drawn, note=note)
    return batch


def _correction(draft: Draft) -> None:
    """Importance weights, by the names of three releases."""
    level, bound = f"{_WEIGHTS}rollout_is", f"{_WEIGHTS}rollout_is_threshold"
    cap = f"{_ACTOR}tis_imp_ratio_cap"
    if draft.get(f"{_WEIGHTS}bypass_mode"):
        draft.ignore("bypass_mode has no weights", level, bound)
    elif draft.get(level) and (bound not in draft.given or draft.given[bound] is not None):
        low, high = _bounds(draft, bound)
        kind = "truncate" if low is None else "mask"
        correct(draft, kind, draft.known(level, _LEVELS), low or 0.0, high, level, bound)
    elif draft.get(_EARLIER) and draft.get(f"{_EARLIER}_threshold"):
        _earlier(draft)
    elif draft.real(cap) > 0:
        correct(draft, "truncate", "token", 0.0, draft.real(cap), cap)
    if f"{CORRECTION}.kind" not in draft.settings:
        given = (key for key in draft.given if key.startswith((_EARLIER, bound)))
        draft.ignore("there are no importance weights", *given)


def _bounds(draft: Draft, key: str) -> tuple[float | None, float]:
    """Bounds from ``2.0`` or ``0.5_2.0``."""
    low, _, high = str(draft.get(key)).rpartition("_")
    try:
        return (float(low) if low else None), float(high)
    except ValueError:
        said = f"{draft.file}: {draft.origin(key)}: expected a number, or low_high"
        raise ValueError(said) from None


def _earlier(draft: Draft) -> None:
    mode, level, low, high = (
        f"{_EARLIER}_{name}" for name in ("mode", "level", "threshold_lower", "threshold")
    )
    kind = draft.known(mode, {"truncate": "truncate", "mask": "mask", "clip": "mask"})
    least = draft.real(low) if draft.has(low) else 1.0 / draft.real(high)
    note = "masked tokens count in the divisor here" if kind == "mask" else ""
    keys = (_EARLIER, mode, level, *([low] * draft.has(low)), high)
    name = draft.known(level, _LEVELS)
    correct(draft, kind, name, least, draft.real(high), *keys, note=note)


def _warm_up(draft: Draft) -> None:
    key, share = f"{_ACTOR}optim.lr_warmup_steps", f"{_ACTOR}optim.lr_warmup_steps_ratio"
    updates = draft.settings[UPDATES].value
    total = draft.settings["steps"].value if "steps" in draft.settings else 0
    note = "" if updates == 1 else f"x {updates}: verl counts steps, but updates count here"
    if draft.number(key) > 0:
        warm_up(draft, draft.number(key) * updates, key, note)
    elif part := draft.real(share):
        count = int(part * total) * updates if total else None
        warm_up(draft, count, share, f"of {total} steps {note}")


def _devices(draft: Draft) -> None:
    """Engines over several GPUs, and replicas that contain whole engines."""
    gpus, engine = "trainer.n_gpus_per_node", f"{_ROLLOUT}tensor_model_parallel_size"
    count, size, shard = draft.get(gpus) or 0, 1, draft.number(f"{_ACTOR}fsdp_config.fsdp_size")
    devices = count * machines(draft, "trainer.nnodes")
    if "engine.kind" in draft.settings and draft.settings["engine.kind"].value == "vllm":
        if (name := str(draft.get(f"{_ROLLOUT}name"))) != "vllm":
            theirs = {"sglang": "SGLang"}.get(name, name)
            draft.warnings.append(f"engine.kind: vLLM replaces {theirs}, which is not supported")
        bypass = draft.get(f"{_WEIGHTS}bypass_mode")
        if not bypass and f"{CORRECTION}.kind" not in draft.settings:
            draft.warnings.append(
                "engine.kind: verl recomputes old log-probabilities with the actor. Here ratios "
                "are to vLLM's own, unless rollout.top_p or top_k cut its softmax"
            )
        size = 1 if count == 1 and not draft.has(engine) else draft.number(engine, 1)
        if count % size:
            draft.refuse(f"{count} GPUs do not divide into engines of {size}", engine)
            size = 1
        else:
            draft.set("engine.tensor_parallel", size, engine)
    if devices == 1:
        return
    if shard > 0 and (shard % size or devices % shard):
        hint = f"a replica of {shard} devices has no whole engines of {size}: all share one"
        draft.refuse(hint, f"{_ACTOR}fsdp_config.fsdp_size")
        shard = 0
    draft.set("trainer.kind", "fsdp", f"{_ACTOR}fsdp_config.fsdp_size")
    shard, note = max(shard, 0), "0 for all"
    if shard == 0:
        note += _two_replicas(draft, devices // 2, size) if devices % 2 == 0 else ""
    draft.set("trainer.shard", shard, f"{_ACTOR}fsdp_config.fsdp_size", note=note)


def _two_replicas(draft: Draft, half: int, size: int) -> str:
    """A reason for replicas of ``half`` the devices, which contain whole engines of ``size``."""
    if half < 2 or half % size:
        return ""
    streamed = " with updates_per_step: 1" if draft.settings[UPDATES].value > 1 else ""
    return (
        f". A replica over all GPUs is busy until the last response. E.g. shard: {half} makes two "
        f"replicas, so that{streamed} one can compute gradients while the tail decodes (doctor "
        "says whether memory holds)"
    )


@cache
def table() -> Table:
    """verl's keys. Rules that use steps or updates come after those that set them."""
    rules = (_start, _rewards, _algorithm, _batch, _warm_up, _correction, _devices)
    return Table.load("verl", rules)
