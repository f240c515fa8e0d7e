"""verl: keys with one counterpart, with none, or with none that matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollpacker.cli.convert.table import Copy, Ignore, Refuse, Rule

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."

_LAYOUT = Ignore("how verl spreads its work; here devices.per_node and trainer.kind=fsdp do")
_SPEED = Ignore("speed and memory only")
_MICRO = Ignore("how much is computed at a time")
_LOOKS = Ignore("logs and profiles")
_PLACE = Ignore("where verl stores and resumes: 'output' and --resume here")
_NO_CRITIC = Ignore("no algorithm here has a critic")
_DATA = Ignore("how verl loads its files")
_PARTS = Ignore("which of verl's own files are put together")
_TURNS = Refuse(
    "one response a prompt: no tools, no turns", unless=(False, 0, "", "single_turn_agent")
)
_ENGINE = Refuse("engines spread by tensor parallelism only: engine.tensor_parallel", unless=(1,))
_IMAGES = Ignore("prompts are text")


def _most_likely(value: Any) -> Any:
    """vLLM says -1 where all tokens are kept."""
    return max(0, value) if isinstance(value, int) else value


def _all(start: str, names: str, rule: Rule) -> dict[str, Rule]:
    """The same rule for several keys."""
    return {f"{start}{name}": rule for name in names.split()}


RULES: Mapping[str, Rule] = {
    "defaults": _PARTS,
    "hydra.*": _PARTS,
    "actor_rollout_ref.hybrid_engine": _LAYOUT,
    "actor_rollout_ref.nccl_timeout": _LAYOUT,
    "actor_rollout_ref.ref.*": _LAYOUT,
    # Sampling
    f"{ROLLOUT}temperature": Copy("rollout.temperature"),
    f"{ROLLOUT}top_p": Copy("rollout.top_p"),
    f"{ROLLOUT}top_k": Copy("rollout.top_k", "0 keeps all", value=_most_likely),
    f"{ROLLOUT}do_sample": Refuse("set rollout.temperature to 0 for greedy ones", unless=(True,)),
    f"{ROLLOUT}ignore_eos": Refuse("responses end with their end token"),
    f"{ROLLOUT}over_sample_rate": Refuse("see rollout.tail_batching.mode: race"),
    f"{ROLLOUT}pipeline_model_parallel_size": _ENGINE,
    f"{ROLLOUT}expert_parallel_size": _ENGINE,
    f"{ROLLOUT}quantization*": Refuse("responses are sampled from the trained weights", unless=()),
    f"{ROLLOUT}calculate_log_probs": Ignore("the sampler's log-probabilities are always kept"),
    f"{ROLLOUT}logprobs_mode": Ignore("the sampler's log-probabilities are always kept"),
    f"{ROLLOUT}multi_turn.enable": _TURNS,
    f"{ROLLOUT}multi_turn.*": Ignore("multi_turn.enable decides"),
    f"{ROLLOUT}agent.default_agent_loop": _TURNS,
    f"{ROLLOUT}agent.agent_loop_config_path": _TURNS,
    f"{ROLLOUT}engine_kwargs.*": Refuse("arguments of the engine are not passed on", unless=({},)),
    f"{ROLLOUT}enable_rollout_routing_replay": Refuse("no mixture of experts"),
    f"{ROLLOUT}qat*": Refuse("no training for quantized weights", unless=({},)),
    f"{ROLLOUT}prompt_length": Ignore("data.max_prompt_length decides"),
    f"{ROLLOUT}mtp*": Ignore("no multi-token prediction"),
    f"{ROLLOUT}*log_prob_*": _MICRO,
    f"{ROLLOUT}val_kwargs.*": Ignore("evaluations: eval.temperature, eval.num_generations"),
    **_all(
        ROLLOUT,
        "agent.* mode data_parallel_size nnodes n_gpus_per_node dtype load_format max_model_len "
        "max_num_batched_tokens enforce_eager cudagraph_capture_sizes enable_chunked_prefill "
        "enable_prefix_caching layered_summon multi_stage_wake_up skip_tokenizer_init seed "
        "scheduling_policy checkpoint_engine.* disaggregation.* router_config_path "
        "full_determinism update_weights_bucket_megabytes use_fire_sampling micro_batch_size",
        _SPEED,
    ),
    **_all(
        ROLLOUT,
        "disable_log_stats trace.* prometheus.* profiler.* moe_load_balance_metrics_interval",
        _LOOKS,
    ),
    # Model
    f"{MODEL}enable_gradient_checkpointing": Copy(
        "train.gradient_checkpointing", "memory only", default=True
    ),
    f"{MODEL}target_modules": Refuse("adapters are on all linear layers", unless=("all-linear",)),
    f"{MODEL}lora.target_modules": Refuse(
        "adapters are on all linear layers", unless=("all-linear",)
    ),
    f"{MODEL}exclude_modules": Refuse("adapters are on all linear layers", unless=([], "")),
    f"{MODEL}lora_adapter_path": Refuse("adapters begin anew", unless=("",)),
    f"{MODEL}lora.dropout": Refuse("no dropout"),
    f"{MODEL}tokenizer_path": Refuse("the tokenizer is the model's", unless=("",)),
    f"{MODEL}hf_config_path": Refuse("the configuration is the model's", unless=("",)),
    f"{MODEL}custom_chat_template": Refuse("the chat template is the tokenizer's", unless=("",)),
    f"{MODEL}override_config": Refuse("the configuration is the model's", unless=({},)),
    f"{MODEL}override_config.*_dropout": Refuse("no dropout"),
    f"{MODEL}override_config.*_pdrop": Refuse("no dropout"),
    f"{MODEL}override_config.*": Refuse("the configuration is the model's", unless=(0.0,)),
    f"{MODEL}mtp.*": Ignore("no multi-token prediction"),
    f"{MODEL}lora.*": Refuse(
        "adapters are plain LoRA", unless=(False, True, "lora", "pre", "xavier", "zero", [])
    ),
    f"{MODEL}external_lib": Refuse("no module is imported first", unless=("",)),
    **_all(
        MODEL,
        "enable_activation_offload fused_kernel_options.* tiled_mlp.* torch_dtype "
        "trust_remote_code use_fused_kernels use_liger use_remove_padding use_shm",
        _SPEED,
    ),
    # Update
    f"{ACTOR}entropy_coeff": Refuse("the loss has no entropy term"),
    f"{ACTOR}shuffle": Refuse("mini-batches are in the order of the step"),
    f"{ACTOR}freeze_vision_tower": _IMAGES,
    f"{ACTOR}fsdp_config.dtype": Refuse("bfloat16 or float32: model.dtype", unless=("bfloat16",)),
    f"{ACTOR}fsdp_config.model_dtype": Ignore("the optimizer's weights are always float32"),
    f"{ACTOR}optim.optimizer": Refuse("the optimizer is AdamW", unless=("AdamW", "adam", "adamw")),
    f"{ACTOR}optim.min_lr_ratio": Refuse("rates decay to 0"),
    f"{ACTOR}optim.min_lr": Refuse("rates decay to 0"),
    f"{ACTOR}optim.num_cycles": Refuse("a cosine falls once", unless=(0.5,)),
    f"{ACTOR}optim.zero_indexed_step": Ignore("train.warmup_from_zero"),
    f"{ACTOR}optim.optimizer_impl": Ignore("the optimizer is AdamW of torch"),
    f"{ACTOR}optim.override_optimizer_config*": Refuse("the optimizer is AdamW"),
    f"{ACTOR}optim.total_training_steps": Ignore("trainer.total_training_steps decides"),
    f"{ACTOR}optim.*": Refuse("the optimizer is AdamW, with the keys of 'train'"),
    f"{ACTOR}policy_loss.*": Ignore("of other values of loss_mode"),
    f"{ACTOR}tau_*": Ignore("of other values of loss_mode"),
    f"{ACTOR}router_replay.*": Ignore("no mixture of experts"),
    f"{ACTOR}*qat.enable": Refuse("no training for quantized weights"),
    **_all(
        ACTOR,
        "fsdp_config.* megatron.* strategy rollout_n ulysses_sequence_parallel_size "
        "use_prefix_grouper use_torch_compile use_fused_kernels use_remove_padding pad_to_length "
        "data_loader_seed qat.* load_weight",
        _LAYOUT,
    ),
    **_all(ACTOR, "ppo_micro_batch_size entropy_from_* entropy_checkpointing", _MICRO),
    **_all(ACTOR, "profiler.* calculate_* sum_pi_squared_checkpointing", _LOOKS),
    f"{ACTOR}checkpoint.*": _PLACE,
    # Data
    "data.seed": Copy("seed", "draws other numbers"),
    "data.shuffle": Copy("data.shuffle"),
    "data.apply_chat_template_kwargs": Ignore("empty"),
    "data.custom_cls.*": Refuse("rows come from data.path: a function of yours there", unless=()),
    "data.sampler.*": Refuse("prompts are drawn in order or shuffled", unless=()),
    "data.datagen.*": Refuse("rows come from data.path", unless=()),
    "data.tokenizer": Refuse("the tokenizer is the model's", unless=("",)),
    **_all("data.", "tool_config_path function_tool_path", _TURNS),
    "data.image_*": _IMAGES,
    "data.video_*": _IMAGES,
    "data.audio_*": _IMAGES,
    **_all("data.", "mm_processor_kwargs* return_multi_modal_inputs", _IMAGES),
    **_all(
        "data.",
        "return_raw_input_ids return_raw_chat return_full_prompt use_shm trust_remote_code "
        "dataloader_num_workers filter_overlong_prompts_workers val_batch_size validation_shuffle",
        _DATA,
    ),
    # Algorithm
    "algorithm.gamma": Refuse("a response has one reward, at its end", unless=(1,)),
    "algorithm.lam": Ignore("no algorithm here has a critic"),
    "algorithm.use_pf_ppo": Refuse("no preference feedback"),
    "algorithm.pf_ppo.*": Ignore("use_pf_ppo decides"),
    "algorithm.filter_groups.max_inflight_gen_batches": Ignore(
        "as many prompts are drawn as are missing"
    ),
    "algorithm.rollout_correction.rollout_is": Refuse(
        "no importance weights for the sampler", unless=()
    ),
    "algorithm.rollout_correction.rollout_rs": Refuse(
        "no rejection by sampler's ratios", unless=()
    ),
    "algorithm.rollout_correction.bypass_mode": Refuse("set by rollout.top_p and top_k"),
    "algorithm.rollout_correction.*": Ignore("rollout_is and rollout_rs decide"),
    "algorithm.rollout_is": Refuse("no importance weights for the sampler"),
    "critic.*": _NO_CRITIC,
    "trainer.critic_warmup": _NO_CRITIC,
    # Rewards
    "reward_model.enable": Refuse("a reward model: the folder of one as rewards[].function"),
    "reward.reward_model.enable": Refuse("a reward model: the folder of one as rewards[].function"),
    "reward_model.launch_reward_fn_async": _SPEED,
    "reward.reward_kwargs.overlong_buffer_cfg.*": _LOOKS,
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": _LOOKS,
    "reward_model.overlong_buffer.*": _LOOKS,
    "custom_reward_function.overlong_buffer.*": _LOOKS,
    "reward.reward_manager.*": Refuse(
        "rewards are functions: rewards[].function", unless=("register", "custom_reward_manager")
    ),
    "reward_model.sandbox_fusion.*": Refuse(
        "programs: reward 'code' with options.remote", unless=(64, 1024)
    ),
    "reward.sandbox_fusion.*": Refuse(
        "programs: reward 'code' with options.remote", unless=(64, 1024)
    ),
    "sandbox_fusion.*": Refuse("programs: reward 'code' with options.remote", unless=()),
    **_all(
        "reward_model.",
        "model.* rollout.* profiler.* enable_resource_pool n_gpus_per_node nnodes num_workers "
        "use_reward_loop strategy max_length micro_batch_size* use_dynamic_bsz "
        "forward_max_token_len_per_gpu ulysses_sequence_parallel_size",
        Ignore("reward_model.enable decides"),
    ),
    "reward_model.reward_loop_*": Refuse("rewards are functions: rewards[].function", unless=("",)),
    "reward.num_workers": Ignore("grading.workers"),
    "reward.reward_model.*": Ignore("reward.reward_model.enable decides"),
    "distillation.enabled": Refuse("no teacher"),
    "distillation.*": Ignore("distillation.enabled decides"),
    # Trainer
    "trainer.nnodes": Refuse("a run has one machine", unless=(1,)),
    "trainer.n_training_gpus_per_node": _LAYOUT,
    "trainer.val_only": Refuse("rollpacker eval"),
    "trainer.val_before_train": Ignore("evaluated before and after"),
    "trainer.v1.trainer_mode": Refuse("training is synchronous", unless=("sync",)),
    "trainer.v1.*": Ignore("trainer_mode decides"),
    "trainer.use_v1": _SPEED,
    "trainer.use_legacy_worker_impl": _SPEED,
    "trainer.balance_batch": _SPEED,
    "trainer.default_*": _PLACE,
    "trainer.resume_*": _PLACE,
    "trainer.max_critic_ckpt_to_keep": _NO_CRITIC,
    **_all(
        "trainer.",
        "project_name log_val_generations rollout_data_dir validation_data_dir profile_steps "
        "*nsight_options* esi_redundant_time ray_wait_register_center_timeout",
        _LOOKS,
    ),
    **_all("trainer.", "checkpoint_callback_class del_local_ckpt_after_load", _PLACE),
    "transfer_queue.*": _LAYOUT,
    "ray_kwargs.*": _LAYOUT,
    "ray_init.*": _LAYOUT,
    "global_profiler.*": _LOOKS,
    "profiler.*": _LOOKS,
    "skip.*": _LOOKS,
}
