"""What TRL, verl, OpenRLHF, ROLL, slime and prime-rl call our keys, as hints for unknown ones.

``rollpacker init --from`` translates whole files by rules of its own, which a test holds against
this table.
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES: Mapping[str, str] = {
    # Responses
    "rollout.num_generations": "n n_samples_per_prompt num_return_sequences "
    "num_return_sequences_in_group rollouts_per_example group_size n_samples num_samples",
    "rollout.max_completion_length": "max_new_tokens max_response_length response_length "
    "generate_max_len rollout_max_response_len max_tokens max_completion_tokens",
    "rollout.prompts_per_step": "rollout_batch_size train_batch_size gen_batch_size batch_size "
    "prompts_per_batch",
    "rollout.stop": "stop_strings stop_sequences stop_words rollout_stop stop_token_ids "
    "eos_token_id eos_token rollout_stop_token_ids",
    "rollout.temperature": "rollout_temperature sampling_temperature",
    "rollout.dynamic_sampling.enabled": "filter_groups dynamic_filtering "
    "dynamic_sampling_filter_path",
    "rollout.dynamic_sampling.max_draws": "max_num_gen_batches",
    "rollout.tail_batching.mode": "over_sample_rate over_sampling_batch_size",
    # Engines and devices
    "engine.kind": "use_vllm rollout_backend inference_backend infer_backend vllm",
    "engine.gpu_memory": "vllm_gpu_memory_utilization gpu_memory_utilization "
    "sglang_mem_fraction_static mem_fraction_static",
    "engine.tensor_parallel": "vllm_tensor_parallel_size tensor_model_parallel_size "
    "tensor_parallel_size rollout_num_gpus_per_engine",
    "engine.max_running": "max_num_seqs max_running_requests",
    "devices.layout": "vllm_mode colocate colocate_all_models",
    "devices.per_node": "n_gpus_per_node num_gpus num_gpus_per_node gpus gpus_per_node "
    "num_processes actor_num_gpus_per_node",
    "devices.nodes": "nnodes num_nodes num_machines actor_num_nodes",
    "trainer.kind": "fsdp fsdp_config deepspeed zero_stage strategy train_backend",
    "trainer.shard": "fsdp_size",
    # Model
    "model.path": "model_name_or_path model_name pretrain pretrained_model hf_checkpoint "
    "base_model actor_model",
    "model.dtype": "torch_dtype bf16 fp16 params_dtype param_dtype mixed_precision precision",
    "model.lora_rank": "lora_r lora_dim use_peft use_lora",
    # Data
    "data.path": "dataset dataset_name dataset_path train_dataset train_file train_files "
    "prompt_data file_name",
    "data.split": "dataset_train_split prompt_split dataset_split",
    "data.input_key": "prompt_key dataset_prompt_column question_key prompt_column",
    "data.label_key": "answer_key answer_column solution_key",
    "data.domain_key": "reward_fn_key tag_key",
    "data.size": "max_samples train_max_samples max_train_samples",
    "data.prompt_template": "input_template",
    "data.chat": "apply_chat_template",
    "data.overlong": "filter_overlong_prompts",
    "data.shuffle": "shuffle_dataset rollout_shuffle",
    "data.drop_last": "dataloader_drop_last",
    "eval.data.path": "val_files val_file test_files eval_dataset eval_prompt_data val_dataset",
    # Rewards
    "rewards": "reward_funcs reward_functions reward_function reward_fn reward_model rm_type "
    "remote_rm_url custom_rm_path custom_reward_function reward_weights verifier",
    # Updates
    "train.learning_rate": "lr actor_learning_rate actor_lr",
    "train.lr_scheduler_type": "lr_scheduler lr_decay_style scheduler",
    "train.warmup_steps": "warmup_ratio lr_warmup_ratio lr_warmup_steps num_warmup_steps "
    "lr_warmup_iters lr_warmup_steps_ratio",
    "train.adam_beta1": "beta1",
    "train.adam_beta2": "beta2",
    "train.max_grad_norm": "clip_grad grad_clip gradient_clipping clip_grad_norm max_norm",
    "train.beta": "kl_coef init_kl_coef kl_loss_coef kl_beta kl_tau use_kl_loss",
    "train.updates_per_step": "ppo_mini_batch_size mini_batch_size global_batch_size "
    "num_steps_per_rollout",
    "train.micro_batch_tokens": "ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "micro_batch_size micro_train_batch_size ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "train.gradient_checkpointing": "enable_gradient_checkpointing "
    "gradient_checkpointing_enable activation_checkpointing recompute_granularity",
    "train.algorithm.kind": "adv_estimator advantage_estimator",
    "train.algorithm.epsilon": "clip_ratio clip_ratio_low clip_range cliprange eps_clip clip_eps",
    "train.algorithm.epsilon_high": "clip_ratio_high eps_clip_high clip_eps_high",
    "train.algorithm.delta": "clip_ratio_c dual_clip dual_clip_loss",
    "train.algorithm.loss_type": "loss_agg_mode",
    "train.algorithm.scale_rewards": "norm_adv_by_std_in_grpo",
    "train.sampler_correction.kind": "vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode rollout_correction rollout_is rollout_is_mode use_tis",
    "train.sampler_correction.level": "rollout_is_level",
    "train.sampler_correction.low": "vllm_importance_sampling_clip_min "
    "rollout_is_threshold_lower tis_clip_low",
    "train.sampler_correction.high": "vllm_importance_sampling_clip_max "
    "vllm_importance_sampling_cap rollout_is_threshold tis_imp_ratio_cap tis_clip",
    # The run
    "epochs": "num_train_epochs total_epochs num_epochs num_epoch n_epochs num_episodes "
    "total_episodes",
    "steps": "max_steps total_training_steps num_rollout num_training_steps total_steps "
    "max_train_steps train_steps",
    "seed": "data_seed random_seed",
    "output": "output_dir save_path default_local_dir ckpt_path run_name experiment_name exp_name",
    "deterministic": "full_determinism deterministic_mode",
    "trackers": "report_to logger loggers use_wandb use_tensorboard track_with wandb "
    "wandb_project project_name tracker",
    "checkpoint.every": "save_steps save_freq save_interval save_strategy ckpt_interval",
    "checkpoint.keep": "save_total_limit max_ckpt_num max_actor_ckpt_to_keep save_limit",
    "checkpoint.best": "load_best_model_at_end metric_for_best_model save_best",
    "eval.every": "eval_steps eval_strategy evaluation_strategy test_freq eval_interval "
    "eval_freq val_interval",
    "eval.num_generations": "num_generations_eval eval_n_samples_per_prompt "
    "n_samples_per_eval_prompt",
    "eval.temperature": "eval_temperature",
    "environment": "multi_turn agent_func_path",
}
"""Names by our key; those that say less than they ask (``use_vllm``) too."""

KEYS: Mapping[str, str] = {name: key for key, names in _NAMES.items() for name in names.split()}
"""Our key by the last part of another framework's."""

_BATCH = (
    "a step trains on rollout.prompts_per_step prompts of rollout.num_generations responses, "
    "train.micro_batch_tokens at a time"
)
_SAMPLER = "tokens are sampled with rollout.temperature, rollout.top_p and rollout.top_k"
_CRITIC = "no algorithm here has a critic"
_ONCE = "each response is used for one update only"
_WHOLE = "prompts are never cut: data.overlong: skip leaves long ones out"
_TRANSLATED = "rollpacker init --from FILE translates verl's configuration"

REASONS: Mapping[str, str] = {
    "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "generation_batch_size": _BATCH,
    "steps_per_generation": _BATCH,
    "num_iterations": _ONCE,
    "ppo_epochs": _ONCE,
    "max_epochs": _ONCE,
    "min_p": _SAMPLER,
    "repetition_penalty": _SAMPLER,
    "frequency_penalty": _SAMPLER,
    "presence_penalty": _SAMPLER,
    "generation_kwargs": _SAMPLER,
    "max_prompt_length": _WHOLE,
    "prompt_max_len": _WHOLE,
    "use_kl_in_reward": "the KL is a term of the loss: train.beta",
    "entropy_coef": "the loss has no entropy term",
    "entropy_coeff": "the loss has no entropy term",
    "entropy_loss_coef": "the loss has no entropy term",
    "critic": _CRITIC,
    "gae_lambda": _CRITIC,
    "lambd": _CRITIC,
    "lam": _CRITIC,
    "vf_coef": _CRITIC,
    "logging_steps": "every step is logged",
    "log_interval": "every step is logged",
    "logging_dir": "what a run leaves behind is in 'output'",
    "resume_from_checkpoint": "a run is resumed by rollpacker train --resume auto",
    "resume_mode": "a run is resumed by rollpacker train --resume auto",
    "load_checkpoint": "a run is resumed by rollpacker train --resume auto",
    "push_to_hub": "nothing is uploaded; a checkpoint loads with from_pretrained",
    "attn_implementation": "the engines and trainers choose it",
    "trust_remote_code": "models here need no code of theirs",
    "actor_rollout_ref": _TRANSLATED,
    "custom_reward": _TRANSLATED,
}
"""Why there is no such key, by the last part of another framework's."""
