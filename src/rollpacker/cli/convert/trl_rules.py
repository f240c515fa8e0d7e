"""TRL: keys with one counterpart, with none, or with none that matters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollpacker.cli.convert.table import Copy, Ignore, Refuse, Rule

_LAYOUT = Ignore("how TRL spreads its work; here devices.per_node and trainer.kind=fsdp do")
_SPEED = Ignore("speed and memory only")
_LOOKS = Ignore("logs and notes")
_HUB = Ignore("nothing is uploaded; checkpoint-N loads with from_pretrained")
_LOADER = Ignore("how TRL loads its rows")
_SERVER = Ignore("vLLM runs in processes of the run: devices.layout")
_LOSS = Ignore("of other values of loss_type")
_REFERENCE = Refuse("the reference model stays as it was")
_QUANTIZED = Refuse("weights are float32 or bfloat16: model.dtype")
_LORA = Refuse("adapters are plain LoRA on all linear layers", unless=(False, "CAUSAL_LM"))
_SAMPLER = Refuse("tokens are sampled with temperature, top_p and top_k", unless=({}, 0, 1.0))


def _most_likely(value: Any) -> Any:
    """vLLM says -1 where all tokens are kept."""
    return max(0, value) if isinstance(value, int) else value


RULES: Mapping[str, Rule] = {
    # Sampling
    "max_completion_length": Copy("rollout.max_completion_length", default=512),
    "temperature": Copy("rollout.temperature"),
    "top_p": Copy("rollout.top_p"),
    "top_k": Copy("rollout.top_k", "0 keeps all", value=_most_likely),
    "min_p": _SAMPLER,
    "repetition_penalty": _SAMPLER,
    "generation_kwargs": _SAMPLER,
    "cache_implementation": _SPEED,
    "use_transformers_*": _SPEED,
    "transformers_continuous_*": _SPEED,
    "max_prompt_length": Refuse(
        "prompts are never cut here: shorten those that are longer", unless=()
    ),
    "max_tool_calling_iterations": Refuse("one response a prompt: no tools", unless=()),
    "vllm_importance_sampling_correction": Refuse(
        "ratios are to the sampler's own log-probabilities, without weights for them"
    ),
    "vllm_importance_sampling_*": Ignore("vllm_importance_sampling_correction decides"),
    "vllm_structured_outputs_regex": _SAMPLER,
    "vllm_guided_decoding_regex": _SAMPLER,
    "vllm_max_model_length": Ignore("the model's context"),
    "vllm_max_model_len": Ignore("the model's context"),
    "vllm_server_*": _SERVER,
    "vllm_group_port": _SERVER,
    "vllm_device": _SERVER,
    "vllm_dtype": _SPEED,
    "vllm_model_impl": _SPEED,
    "vllm_enable_*": _SPEED,
    # Data
    "dataset_prompt_column": Copy("data.input_key"),
    "system_prompt": Copy("data.system_prompt"),
    "shuffle_dataset": Copy("data.shuffle"),
    "seed": Copy("seed", "draws other numbers", default=42),
    "data_seed": Ignore("seed decides"),
    "dataset_streaming": _LOADER,
    "streaming": _LOADER,
    "test_split_size": Refuse("eval.fraction", unless=()),
    "chat_template": Refuse("the chat template is the tokenizer's", unless=("",)),
    "chat_template_path": Refuse("the chat template is the tokenizer's", unless=("",)),
    "dataset_num_proc": _LOADER,
    "dataloader_*": _LOADER,
    "remove_unused_columns": _LOADER,
    "pad_to_multiple_of": _SPEED,
    # Update
    "weight_decay": Copy("train.weight_decay"),
    "adam_beta1": Copy("train.adam_beta1"),
    "adam_beta2": Copy("train.adam_beta2"),
    "adam_epsilon": Refuse("AdamW adds 1e-8", unless=(1e-8,)),
    "max_grad_norm": Copy("train.max_grad_norm"),
    "mask_truncated_completions": Copy("train.mask_truncated_completions"),
    "gradient_checkpointing": Copy("train.gradient_checkpointing", "memory only", default=True),
    "gradient_checkpointing_kwargs": _SPEED,
    "lr_scheduler_kwargs": Refuse("rates decay to 0", unless=({},)),
    "optim": Refuse(
        "the optimizer is AdamW",
        unless=("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"),
    ),
    "optim_args": Refuse("the optimizer is AdamW, with the keys of 'train'", unless=("",)),
    "normalize_advantages": Refuse("advantages of rloo are not scaled"),
    "reward_clip_range": Refuse("rewards are not clipped", unless=()),
    "multi_objective_aggregation": Refuse(
        "rewards are summed with their weights", unless=("sum_then_normalize",)
    ),
    "top_entropy_quantile": Refuse("all tokens are in the loss", unless=(1.0,)),
    "entropy_coef": Refuse("the loss has no entropy term"),
    "use_adaptive_entropy": Refuse("the loss has no entropy term"),
    "entropy_*": Ignore("entropy_coef and use_adaptive_entropy decide"),
    "off_policy_mask_threshold": Refuse("no responses are masked by their ratio", unless=()),
    "sync_ref_model": _REFERENCE,
    "ref_model_*": Ignore("sync_ref_model decides"),
    "sapo_*": _LOSS,
    "vespo_*": _LOSS,
    "disable_dropout": Ignore("models here have no dropout"),
    "cast_lm_head_to_fp32": Ignore("logits are float32 here"),
    "router_aux_loss_coef": Ignore("no mixture of experts"),
    "use_liger_kernel": _SPEED,
    "use_liger_loss": _SPEED,
    "neftune_noise_alpha": Refuse("no noise is added", unless=()),
    "label_smoothing_factor": Ignore("of supervised losses"),
    # Model
    "model_revision": Refuse("the newest revision is taken", unless=("main",)),
    "trust_remote_code": Ignore("models here need no code of theirs"),
    "attn_implementation": _SPEED,
    "load_in_8bit": _QUANTIZED,
    "load_in_4bit": _QUANTIZED,
    "bnb_4bit_*": Ignore("load_in_4bit decides"),
    "use_bnb_nested_quant": Ignore("load_in_4bit decides"),
    "lora_*": _LORA,
    "use_rslora": _LORA,
    "use_dora": _LORA,
    # Where and how it runs
    "env": Refuse("set environment variables in the shell", unless=({},)),
    "accelerate_config": _LAYOUT,
    "ds3_gather_for_generation": _LAYOUT,
    "deepspeed": _LAYOUT,
    "fsdp*": _LAYOUT,
    "ddp_*": _LAYOUT,
    "parallelism_config": _LAYOUT,
    "num_machines": Refuse("a run has one machine", unless=(1,)),
    "tf32": _SPEED,
    "torch_compile*": _SPEED,
    "torch_empty_cache_steps": _SPEED,
    "ignore_bias_buffers": _LAYOUT,
    "auto_find_batch_size": Ignore("TRL refuses it"),
    "eval_on_start": Ignore("evaluated before and after"),
    "do_*": Ignore("eval_strategy decides"),
    "per_device_eval_batch_size": _SPEED,
    "eval_accumulation_steps": _SPEED,
    "include_*": _LOOKS,
    "log_*": _LOOKS,
    "logging_*": _LOOKS,
    "run_name": _LOOKS,
    "project": _LOOKS,
    "trackio_*": _LOOKS,
    "wandb_*": _LOOKS,
    "disable_tqdm": _LOOKS,
    "num_completions_to_print": _LOOKS,
    "report_*": _LOOKS,
    "push_to_hub*": _HUB,
    "hub_*": _HUB,
    "overwrite_*": _HUB,
    "save_*": Ignore("checkpoints here hold all that a run needs to go on"),
    "resume_from_checkpoint": Ignore("--resume auto"),
    "load_best_model_at_end": Refuse("checkpoint.best"),
    "metric_for_best_model": Ignore("checkpoint.best"),
    "greater_is_better": Ignore("checkpoint.best"),
    "full_determinism": Ignore("deterministic: true"),
}
