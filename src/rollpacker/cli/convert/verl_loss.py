"""verl: the loss and the update, where several keys together say what happens."""

from __future__ import annotations

from rollpacker.cli.convert.table import Draft, Joint
from rollpacker.cli.convert.verl_rules import ACTOR, ROLLOUT

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
_KIND = "train.algorithm.kind"
_ESTIMATOR, _MODE = "algorithm.adv_estimator", f"{ACTOR}policy_loss.loss_mode"
_AVERAGE, _OLD_AVERAGE = f"{ACTOR}loss_agg_mode", f"{ACTOR}use_token_level_loss"
_SCALE = "algorithm.norm_adv_by_std_in_grpo"
_LOW, _HIGH, _BOTH = f"{ACTOR}clip_ratio_low", f"{ACTOR}clip_ratio_high", f"{ACTOR}clip_ratio"
_DUAL, _DIVISOR = f"{ACTOR}clip_ratio_c", f"{ACTOR}loss_scale_factor"
_BUFFERS = (
    "reward.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward_model.overlong_buffer.",
    "custom_reward_function.overlong_buffer.",
)
_CAPS = ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len")
_FILTER = "algorithm.filter_groups."
_KL, _KL_WEIGHT, _KL_TYPE = (
    f"{ACTOR}use_kl_loss",
    f"{ACTOR}kl_loss_coef",
    f"{ACTOR}kl_loss_type",
)
_IN_REWARD = "algorithm.use_kl_in_reward"
_KL_REWARD = tuple(f"algorithm.kl_ctrl.{n}" for n in ("type", "kl_coef", "horizon", "target_kl"))
_BATCH, _MINI, _PASSES = (
    "data.train_batch_size",
    f"{ACTOR}ppo_mini_batch_size",
    f"{ACTOR}ppo_epochs",
)
_DYNAMIC = f"{ACTOR}use_dynamic_bsz"
_TOKENS, _MICRO = f"{ACTOR}ppo_max_token_len_per_gpu", f"{ACTOR}ppo_micro_batch_size_per_gpu"
_RATE = f"{ACTOR}optim."
# The old name goes before the new one.
_SCHEDULES = tuple(f"{_RATE}{n}" for n in ("warmup_style", "lr_scheduler_type", "lr_decay_style"))
_WARM, _WARM_SHARE = f"{_RATE}lr_warmup_steps", f"{_RATE}lr_warmup_steps_ratio"
_CLIPS = (f"{_RATE}grad_clip", f"{_RATE}clip_grad", f"{ACTOR}grad_clip")
_LENGTHS = ("data.max_response_length", f"{ROLLOUT}response_length")


def _length(draft: Draft) -> int:
    key, value = draft.first(*_LENGTHS, default=512)
    return draft.whole(key, value, least=1)


def _algorithm(draft: Draft) -> None:
    """The kind, by estimator, loss and average; then its options."""
    estimator = draft.get(_ESTIMATOR, "gae")
    kind = _ESTIMATORS.get(str(estimator))
    if kind is None:
        raise draft.no_counterpart(_ESTIMATOR, "gae", ", ".join(_ESTIMATORS))
    mode = draft.get(_MODE, "vanilla")
    if mode not in ("vanilla", "gspo"):
        raise draft.no_counterpart(_MODE, "vanilla", "vanilla, gspo")
    average = str(draft.get(_AVERAGE, "token-mean"))
    if draft.get(_OLD_AVERAGE) is False:
        average = "seq-mean-token-mean"
    why = draft.origin(_ESTIMATOR)
    if mode == "gspo":
        if kind != "grpo":
            raise draft.no_counterpart(
                _MODE, "vanilla", f"gspo with GRPO's advantages, not {estimator}'s"
            )
        kind, why = "gspo", f"{draft.origin(_MODE)}, {why}"
    elif kind == "grpo":
        kind, why = _average(draft, average), f"{why}, {draft.origin(_AVERAGE, 'token-mean')}"
    draft.set(_KIND, kind, why)
    _divisors(draft, kind, average)
    _scale(draft, kind)
    _clip(draft, kind)


def _average(draft: Draft, average: str) -> str:
    """Which member of GRPO's family it is."""
    kind = _AVERAGES.get(average)
    if kind is None:
        raise draft.no_counterpart(_AVERAGE, "token-mean", ", ".join(_AVERAGES))
    wider = draft.get(_HIGH, 0.2) != draft.get(_LOW, 0.2)
    if average == "token-mean" and (wider or _buffer(draft)):
        return "dapo"
    return kind


def _divisors(draft: Draft, kind: str, average: str) -> None:
    """What a loss is divided by."""
    if kind == "grpo":
        ours = "token_mean" if average == "token-mean" else "sequence_mean"
        draft.set("train.algorithm.loss_type", ours, draft.origin(_AVERAGE, "token-mean"))
    usual = {
        "rloo": "seq-mean-token-sum",
        "reinforce_pp": "token-mean",
        "gspo": "seq-mean-token-mean",
    }
    if kind in usual and average != usual[kind]:
        text = f"{kind} averages as {usual[kind]} does"
        draft.refuse(text, _AVERAGE, _OLD_AVERAGE)
        if _AVERAGE not in draft.given and _OLD_AVERAGE not in draft.given:
            draft.warnings.append(f"train.algorithm: {text}, verl's default is {average}")
    cap = _length(draft)
    if kind == "dr_grpo" and draft.get(_DIVISOR, cap) != cap:
        draft.refuse(f"dr_grpo divides by the longest response, {cap}", _DIVISOR)
    else:
        draft.ignore("dr_grpo divides by the longest response", _DIVISOR)


def _scale(draft: Draft, kind: str) -> None:
    scaled = draft.get(_SCALE, True)
    if kind in ("grpo", "dapo", "gspo"):
        if not scaled:
            draft.set("train.algorithm.scale_rewards", "none", draft.origin(_SCALE))
        else:
            draft.ignore("by the group's standard deviation, as here", _SCALE)
    elif kind == "dr_grpo" and scaled:
        text = "dr_grpo divides by no standard deviation"
        draft.refuse(text, _SCALE)
        if _SCALE not in draft.given:
            draft.warnings.append(f"train.algorithm: {text}, verl does by default")
    else:
        draft.ignore(f"{kind} divides by no standard deviation of a group", _SCALE)


def _clip(draft: Draft, kind: str) -> None:
    # verl's own defaults of low and high go before clip_ratio, unless they are null.
    low_key = _BOTH if _LOW in draft.given and draft.get(_LOW) is None else _LOW
    high_key = _BOTH if _HIGH in draft.given and draft.get(_HIGH) is None else _HIGH
    low, high = draft.get(low_key, 0.2), draft.get(high_key, 0.2)
    draft.set("train.algorithm.epsilon", low, draft.origin(low_key, 0.2))
    if kind in ("dapo", "gspo"):
        draft.set("train.algorithm.epsilon_high", high, draft.origin(high_key, 0.2))
    elif high != low:
        draft.refuse(f"{kind} has one clip range for both sides: {low}", high_key)
    if _BOTH not in (low_key, high_key):
        draft.ignore("verl clips by clip_ratio_low and clip_ratio_high", _BOTH)
    if kind in ("rloo", "gspo"):
        if kind == "gspo":
            draft.ignore("verl's gspo has none, as here", _DUAL)
        else:
            draft.refuse("rloo has no dual clip", _DUAL)
        return
    delta = draft.get(_DUAL, 3.0)
    draft.set("train.algorithm.delta", delta, f"{draft.origin(_DUAL, 3.0)}: dual clip")


def _buffer(draft: Draft) -> str:
    """Where DAPO's punishment of long responses is set; empty where it is off."""
    return next((each for each in _BUFFERS if draft.get(f"{each}enable", False)), "")


def _shaping(draft: Draft) -> None:
    """DAPO's two additions: punishment of long responses, dynamic sampling."""
    keys = [f"{start}{name}" for start in _BUFFERS for name in ("enable", "len", "penalty_factor")]
    start, cap = _buffer(draft), _length(draft)
    if not start:
        draft.ignore("no punishment of long responses", *keys, *_CAPS)
    elif draft.settings[_KIND].value != "dapo":
        draft.refuse("long responses are punished with token-mean and GRPO only", *keys, *_CAPS)
    else:
        long, weight = draft.get(f"{start}len", 0), draft.get(f"{start}penalty_factor", 1.0)
        ends = [draft.origin(key) for key in _CAPS if draft.get(key) == cap]
        why = ", ".join((draft.origin(f"{start}enable"), draft.origin(f"{start}len"), *ends))
        draft.set("train.algorithm.overlong_buffer", long, why)
        draft.set(
            "train.algorithm.overlong_penalty", weight, draft.origin(f"{start}penalty_factor", 1.0)
        )
        for key in _CAPS:
            if draft.get(key, cap) != cap:
                draft.refuse(f"the punishment ends at the longest response, {cap}", key)
    keys = [f"{_FILTER}max_num_gen_batches", f"{_FILTER}metric", "data.gen_batch_size"]
    if not draft.get(f"{_FILTER}enable", False):
        draft.ignore("no groups are filtered", f"{_FILTER}enable", *keys)
        return
    draft.set("rollout.dynamic_sampling.enabled", True, draft.origin(f"{_FILTER}enable"))
    most = draft.number(keys[0], 0)
    if most > 1:
        why = (
            f"{draft.origin(keys[0])}, the first included; verl then stops, here a step is smaller"
        )
        draft.set("rollout.dynamic_sampling.max_draws", most - 1, why)
    else:
        draft.refuse("4 extra draws at most: rollout.dynamic_sampling.max_draws", keys[0])
    if draft.get(keys[1], "reward") == "acc":
        draft.refuse("groups with equal rewards are dropped, whatever their accuracy", keys[1])
    else:
        draft.ignore("groups with equal rewards are dropped, as here", keys[1])
    draft.ignore("as many prompts are drawn as are missing", keys[2])


def _divergence(draft: Draft) -> None:
    """KL to the reference: in the loss it is ours, in the reward it is not."""
    keys = ("algorithm.kl_penalty", *_KL_REWARD)
    if draft.get(_IN_REWARD, False):
        draft.refuse("the KL is in the loss here (train.beta), not in rewards", _IN_REWARD, *keys)
    else:
        draft.ignore("use_kl_in_reward is off", _IN_REWARD, *keys)
    if not draft.get(_KL, False):
        draft.ignore("use_kl_loss is off", _KL, _KL_WEIGHT, _KL_TYPE)
        return
    origins = (draft.origin(_KL), draft.origin(_KL_WEIGHT, 0.001))
    why = ", ".join((*origins, draft.origin(_KL_TYPE, "low_var_kl")))
    draft.set("train.beta", draft.get(_KL_WEIGHT, 0.001), why)
    draft.set("train.kl_bias_correction", False, "verl's KL loss is without the ratio")
    if draft.get(_KL_TYPE, "low_var_kl") not in ("low_var_kl", "k3"):
        draft.refuse("the KL is estimated by k3 (low_var_kl)", _KL_TYPE)


def _batch(draft: Draft) -> None:
    """Prompts, mini-batches, and how much is computed at a time."""
    prompts, mini = draft.number(_BATCH, 1024, 1), draft.number(_MINI, 256, 1)
    draft.set(
        "rollout.prompts_per_step", prompts, f"{draft.origin(_BATCH, 1024)}: prompts, as here"
    )
    count = draft.number(f"{ROLLOUT}n", 1)
    draft.set("rollout.num_generations", count, draft.origin(f"{ROLLOUT}n", 1))
    cap = _length(draft)
    key = draft.first(*_LENGTHS)[0]
    draft.set("rollout.max_completion_length", cap, draft.origin(key, 512))
    draft.lost(key, *_LENGTHS)
    updates = -(-prompts // mini)
    why = f"{draft.origin(_BATCH, 1024)} / {draft.origin(_MINI, 256)}"
    draft.set("train.updates_per_step", updates, why)
    if prompts % mini:
        draft.refuse(
            f"mini-batches are equal here: {updates} of about {prompts / updates:g}", _MINI
        )
    if draft.number(_PASSES, 1) > 1:
        draft.refuse("each response is used for one update only", _PASSES)
    else:
        draft.ignore("each response is used once, as here", _PASSES)
    _micro(draft, draft.number("data.max_prompt_length", 512) + cap)


def _micro(draft: Draft, longest: int) -> None:
    if draft.get(_DYNAMIC, False):
        tokens = draft.number(_TOKENS, 16384)
        why = f"{draft.origin(_DYNAMIC)}, {draft.origin(_TOKENS, 16384)}"
        draft.set("train.micro_batch_tokens", tokens, why)
        draft.ignore("use_dynamic_bsz goes before", _MICRO)
    elif draft.get(_MICRO):
        draft.set(
            "train.micro_batch_tokens",
            draft.number(_MICRO, 1) * longest,
            f"{draft.origin(_MICRO)} x {longest} tokens of the longest prompt and response",
        )
        draft.ignore("use_dynamic_bsz is off", _DYNAMIC, _TOKENS)
    else:
        draft.ignore("no size of micro-batches is given", _DYNAMIC, _TOKENS)


def _optimizer(draft: Draft) -> None:
    updates = draft.settings["train.updates_per_step"].value
    rate = f"{_RATE}lr"
    draft.set("train.learning_rate", draft.get(rate, 1e-6), draft.origin(rate, 1e-6))
    key, schedule = draft.first(*_SCHEDULES, default="constant")
    if schedule not in ("constant", "linear", "cosine"):
        draft.refuse("constant, linear or cosine; left at constant", key)
    else:
        draft.set("train.lr_scheduler_type", schedule, draft.origin(key, "constant"))
    draft.lost(key, *_SCHEDULES)
    _warm_up(draft, updates)
    decay = f"{_RATE}weight_decay"
    draft.set("train.weight_decay", draft.get(decay, 0.01), draft.origin(decay, 0.01))
    betas = draft.get(f"{_RATE}betas")
    if isinstance(betas, list) and len(betas) == 2:
        for name, value in zip(("adam_beta1", "adam_beta2"), betas, strict=True):
            draft.set(f"train.{name}", value, draft.origin(f"{_RATE}betas"))
    key, clip = draft.first(*_CLIPS, default=1.0)
    draft.set("train.max_grad_norm", clip, draft.origin(key, 1.0))
    draft.lost(key, *_CLIPS)


def _warm_up(draft: Draft, updates: int) -> None:
    count, share = draft.number(_WARM, -1), draft.real(_WARM_SHARE, 0.0)
    known = draft.asked.steps
    total = known or draft.number("trainer.total_training_steps", 0)
    if count > 0:
        why = f"{draft.origin(_WARM)}"
        draft.ignore("lr_warmup_steps goes before", _WARM_SHARE)
    elif share == 0.0:
        draft.ignore("no warm-up", _WARM, _WARM_SHARE)
        return
    elif total:
        count = int(share * total)
        why = f"{draft.origin(_WARM_SHARE)} of {total} steps"
        draft.ignore("lr_warmup_steps_ratio is taken", _WARM)
    else:
        draft.refuse(
            "how many steps there will be is not known: --steps N, or train.warmup_steps",
            _WARM_SHARE,
        )
        draft.ignore("lr_warmup_steps_ratio is taken", _WARM)
        return
    each = "" if updates == 1 else f" x {updates}: verl counts steps, here updates count"
    draft.set("train.warmup_steps", count * updates, why + each)
    draft.set("train.warmup_from_zero", True, "as in verl")


JOINTS = (
    Joint(
        (
            _ESTIMATOR,
            _MODE,
            _AVERAGE,
            _OLD_AVERAGE,
            _SCALE,
            _LOW,
            _HIGH,
            _BOTH,
            _DUAL,
            _DIVISOR,
        ),
        _algorithm,
    ),
    Joint(
        (
            *(
                f"{start}{name}"
                for start in _BUFFERS
                for name in ("enable", "len", "penalty_factor")
            ),
            *_CAPS,
            *(f"{_FILTER}{name}" for name in ("enable", "max_num_gen_batches", "metric")),
            "data.gen_batch_size",
        ),
        _shaping,
    ),
    Joint(
        (_KL, _KL_WEIGHT, _KL_TYPE, _IN_REWARD, "algorithm.kl_penalty", *_KL_REWARD), _divergence
    ),
    Joint(
        (
            _BATCH,
            _MINI,
            _PASSES,
            f"{ROLLOUT}n",
            *_LENGTHS,
            _DYNAMIC,
            _TOKENS,
            _MICRO,
        ),
        _batch,
    ),
    Joint(
        (
            f"{_RATE}lr",
            *_SCHEDULES,
            _WARM,
            _WARM_SHARE,
            f"{_RATE}weight_decay",
            f"{_RATE}betas",
            *_CLIPS,
        ),
        _optimizer,
    ),
)
"""In this order: the optimizer counts the updates of the batch."""
