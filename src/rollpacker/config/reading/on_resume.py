"""What becomes of a run that goes on with another value of a key: every key has its class."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

OnResume = Literal["free", "last bits", "said", "refused"]

MEANING: Mapping[OnResume, str] = {
    "free": "may change: samples and updates stay what they would have been",
    "last bits": "may change, and a line names the key: the same is sampled and summed but for the "
    "last bits; in modes that race, how fast responses end (`grading.workers` too) also decides "
    "which of them win",
    "said": "may change, and a line names the key: what is learned from there on is another (by "
    "`steps` and `epochs` only where `train.lr_scheduler_type` is not `constant`)",
    "refused": "would be another run",
}

_KEYS: Mapping[OnResume, str] = {
    "free": """
        output trackers grading.workers environment.processes
        rollout.speculation.mode rollout.dynamic_sampling.max_empty_steps
        train.gradient_checkpointing train.max_skipped_updates
        devices.pin cluster.address cluster.heartbeat_s cluster.restarts
        eval eval.data eval.every eval.temperature eval.num_generations eval.threshold
        checkpoint.every checkpoint.keep checkpoint.grace_s checkpoint.best checkpoint.journal_mb
        checkpoint.signals samples.texts samples.token_ids samples.max_gb
        mux.url mux.token_file mux.cafile mux.job mux.slo mux.worst_rollout_s mux.worst_train_s
        mux.team mux.priority mux.rollout_memory_gb mux.train_memory_gb mux.managed mux.cores
    """,
    "last bits": """
        rewards[].batch grading.asynchronous environment.concurrency
        rollout.streaming.enabled rollout.streaming.consolidate_below rollout.streaming.lookahead
        rollout.streaming.group_tokens rollout.streaming.scaling rollout.streaming.scaling_fraction
        rollout.planner
        engine.kind engine.tensor_parallel engine.max_running engine.kv_tokens engine.block_size
        engine.gpu_memory
        train.micro_batch_tokens train.packing trainer.kind trainer.shard
        devices.nodes devices.per_node devices.per_gpu devices.threads devices.kind devices.layout
        devices.training devices.turns
    """,
    "said": """
        steps epochs rewards[].timeout_s rewards[].on_error grading.retries rollout.max_retries
        environment.step_timeout_s environment.start_timeout_s
        train.learning_rate train.lr_scheduler_type train.warmup_steps
        train.sampler_correction.kind train.sampler_correction.level
        train.sampler_correction.low train.sampler_correction.high
    """,
    "refused": """
        seed deterministic
        model.path model.dtype model.lora_rank model.lora_alpha model.chat_template_kwargs
        data.path data.split data.options data.size data.seed data.input_key data.label_key
        data.domain_key data.system_prompt data.shots data.prompt_template data.chat data.shuffle
        data.drop_last data.overlong data.missing data.exclude
        rewards rewards[].function rewards[].name rewards[].domains rewards[].weight
        rewards[].options rewards[].needs_group
        environment environment.kind environment.path environment.options environment.variables
        environment.max_turns environment.max_total_tokens environment.on_error
        environment.failed_reward environment.call_format environment.reward environment.weight
        grading.code_timeout.adaptive grading.code_timeout.factor grading.code_timeout.least_s
        grading.code_timeout.most_s
        rollout.prompts_per_step rollout.num_generations rollout.max_completion_length
        rollout.temperature rollout.top_p rollout.top_k rollout.stop
        rollout.tail_batching.mode rollout.tail_batching.eta_prompts
        rollout.tail_batching.eta_responses rollout.tail_batching.long_round_steps
        rollout.tail_batching.max_staleness rollout.tail_batching.stale_tokens
        rollout.tail_batching.bucket_rounds rollout.tail_batching.bias_limit
        rollout.tail_batching.race_responses rollout.tail_batching.censoring_weights
        rollout.tail_batching.audit_every rollout.tail_batching.audit_prompts
        rollout.dynamic_sampling.enabled rollout.dynamic_sampling.max_draws
        rollout.min_reward_range
        engine.lengths
        train.algorithm.kind train.algorithm.scale_rewards train.algorithm.std_epsilon
        train.algorithm.delta train.algorithm.loss_type train.algorithm.epsilon
        train.algorithm.epsilon_high train.algorithm.overlong_buffer
        train.algorithm.overlong_penalty train.algorithm.whiten
        train.warmup_from_zero train.weight_decay train.adam_beta1 train.adam_beta2
        train.max_grad_norm train.beta train.kl_bias_correction train.mask_truncated_completions
        train.updates_per_step
        eval.fraction devices.emulate
    """,
}

CLASSES: Mapping[str, OnResume] = {
    key: kind for kind, keys in _KEYS.items() for key in keys.split()
}
"""By dotted key, with ``[]`` for the items of a list. A section's own entry is for where it comes
or goes as a whole."""

_WHOLE = ("eval.data",)
"""Sections whose keys are of one class with them: these choose problems to measure by."""

_END = ("steps", "epochs")


def plain_key(key: str) -> str:
    """``rewards[].timeout_s`` of ``rewards.0.timeout_s``."""
    return re.sub(r"\.\d+(?=\.)", "[]", key)


def on_resume(key: str) -> OnResume:
    """The class of a key; what is not known is refused."""
    key = plain_key(key)
    whole = next((each for each in _WHOLE if key.startswith(f"{each}.")), key)
    return CLASSES.get(whole, "refused")


def of_change(key: str, before: Any, now: Any, *, scheduled: bool) -> OnResume:
    """The class of one change, as some keys have other classes for some values.

    ``scheduled``: the learning rate depends on when the run is to end.
    """
    if key in _END and not scheduled:
        return "free"
    if key == "engine.kind" and "fake" in (before, now):  # it samples no model
        return "refused"
    return on_resume(key)
