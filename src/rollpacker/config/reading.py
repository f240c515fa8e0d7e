"""Read a configuration from a file and overrides, explain its mistakes, and mask its secrets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ValidationError

from rollpacker.config.base import Config, choices, keys, kind_of
from rollpacker.config.tree import RunConfig
from rollpacker.errors import words_of

_NAME = re.compile(
    r"((^|[.-])key|(^|[_.-])(auth|pass)|token|secret|passw(or)?d|passphrase|credential|bearer|"
    r"(api|access|secret|private|openai|anthropic|azure|wandb|service)[_-]?key|authorization|cookie)"
    r"s?([_-]?\d+)?$"
)
_NO_SECRETS = {"stale_tokens"}  # keys of a run's configuration that only look like secrets
_TEXT = re.compile(
    r"\b((sk|hf|gh[opsur]|github_pat|glpat|xox[abp])[-_][A-Za-z0-9_-]{12,}|AKIA[A-Z0-9]{12,})|"
    r"://[^/@\s]+:[^/@\s]+@"
)
"""The look of well-known services' keys, and of addresses with a password."""
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
STARS = "***"


def masked(value: Any, name: str = "") -> Any:
    """Return a plain tree with stars in place of secrets, found by their name or their look."""
    if isinstance(value, Mapping):
        tree = cast(Mapping[str, Any], value)
        return {key: masked(each, str(key)) for key, each in tree.items()}
    if isinstance(value, list | tuple):
        return [masked(each, name) for each in cast(Sequence[Any], value)]
    secret = isinstance(value, str) and bool(value) and (_names(name) or _TEXT.search(value))
    return STARS if secret else value


def _names(name: str) -> bool:
    key = _HUMP.sub("_", name).lower()
    return key.rpartition(".")[2] not in _NO_SECRETS and bool(_NAME.search(key))


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Mask a program's arguments: ``--api-key abc``, ``rewards.0.options.api_key=abc``."""
    shown: list[str] = []
    flag = ""
    for text in arguments:
        name, equals, value = text.partition("=")
        if equals:
            shown.append(f"{name}={masked(value, name)}")
        else:
            shown.append(text if text.startswith("-") else masked(text, flag))
        flag = text if text.startswith("-") and not equals else ""
    return shown


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
"""Names of TRL, verl, OpenRLHF, ROLL, slime and prime-rl, by our key. Names with a narrower
meaning (``use_vllm``) are included."""

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
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")
"""Endings of launch scripts."""
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
    "push_to_hub": "nothing is uploaded, and a checkpoint loads with from_pretrained",
    "attn_implementation": "the engines and trainers choose it",
    "trust_remote_code": "models here need no code of theirs",
    "actor_rollout_ref": _TRANSLATED,
    "custom_reward": _TRANSLATED,
}
"""The reason why a key is missing here, by the last part of another framework's key."""


_LONGEST = 80  # characters of a wrong value that are shown
_TYPE = re.compile(r"(?:str|int|float|bool|(?:list|dict|literal|function|constrained)\W.*)$")
"""Pydantic's names for a union's members in an error's location."""


def mistakes(tree: type[Config], error: ValidationError) -> dict[str, str]:
    """Return one sentence by dotted key, in the order of the tree. A union's alternatives share
    one."""
    found: dict[str, list[Any]] = {}
    for each in error.errors(include_url=False):
        found.setdefault(".".join(_keys(tree, each)), []).append(each)
    return {key: _sentence(tree, key, errors) for key, errors in found.items()}


def _keys(tree: type[Config], error: Any) -> Iterator[str]:
    kinds = {kind_of(model) for _, model in _sections(tree)} - {""}
    last = len(error["loc"]) - 1
    for place, part in enumerate(error["loc"]):
        unknown = place == last and error["type"] == "extra_forbidden"
        if unknown or not (part in kinds or _TYPE.match(str(part)) or part == "[key]"):
            yield str(part)


def _sentence(tree: type[Config], key: str, errors: Sequence[Any]) -> str:
    first = errors[0]
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown key '{key}'{_hint(tree, key)}"
    if first["type"] == "missing":
        return f"'{key}' is required"
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        return f"'{key}': {said}" if key else said
    models, value = _models(tree, key), first["input"]
    if "tag" in first["type"]:
        kinds = [kind_of(model) for model in models]
        key, wanted, value = f"{key}.kind", _either(kinds), value.get("kind")
        meant = _near(value, kinds)
    else:
        wanted = " or ".join(dict.fromkeys(_wanted(each, models) for each in errors))
        meant = _read_otherwise(errors, value)
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
    where = f"'{key}': " if key else ""
    return f"{where}must be {wanted}, got {shown}{meant}"


def _wanted(error: Any, models: Sequence[type[Config]]) -> str:
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"keys and values{_example(models, error['input'])}"
    text = error["msg"] if error["type"] == "literal_error" else error["msg"].partition(", ")[0]
    return text.removeprefix("Input should be ")


def _example(models: Sequence[type[Config]], value: Any) -> str:
    """The key that a bare value stands for: the one with such a choice, else the required one."""
    fields = [item for model in models for item in model.model_fields.items()]
    having = [name for name, field in fields if value in choices(field.annotation)]
    meant = set(having or [name for name, field in fields if field.is_required()])
    fits = isinstance(value, str) and len(value) <= _LONGEST and len(meant) == 1
    return f" such as '{meant.pop()}: {value}'" if fits else ""


def _read_otherwise(errors: Sequence[Any], value: Any) -> str:
    """A hint if YAML read a text as another type, or if a choice is misspelled."""
    choices = [each["ctx"]["expected"] for each in errors if each["type"] == "literal_error"]
    choices = "".join(choices).split("'")[1::2]
    truth = isinstance(value, bool) and {"on", "yes", "off", "no"} & {*choices}
    if truth or (isinstance(value, int | float) and errors[0]["type"] == "string_type"):
        kind = "truth value" if isinstance(value, bool) else "number"
        return f"; YAML reads it as a {kind}: put it in quotes"
    return _near(value, choices)


def _near(value: Any, choices: Sequence[str]) -> str:
    near = get_close_matches(str(value), choices, 1)
    return f"; did you mean '{near[0]}'?" if near else ""


def _either(words: Sequence[str]) -> str:
    *others, last = map(repr, dict.fromkeys(words))
    return f"{', '.join(others)} or {last}" if others else last


def _hint(tree: type[Config], key: str) -> str:
    """Suggest the key that is meant, or nothing rather than a guess."""
    *parents, name = key.split(".")
    paths = [
        f"{path}.{each}".lstrip(".")
        for path, model in _sections(tree)
        for each in model.model_fields
    ]
    wrong = name.lower().replace("-", "_")
    if wrong in REASONS and "rewards" in tree.model_fields:
        return f"; {REASONS[wrong]}"
    here = _models(tree, ".".join(parents))
    kinds = [kind_of(model) for model in here if name in model.model_fields and kind_of(model)]
    if kinds:
        return f"; for it set {'.'.join([*parents, 'kind'])}={' or '.join(kinds)}"
    siblings = [each for model in here for each in model.model_fields]
    close = get_close_matches(wrong, siblings, 1, 0.75)
    close = close or [each for each in siblings if each.startswith(wrong) and len(wrong) > 3]
    found = (
        [path for path in paths if path == KEYS.get(wrong)],
        [".".join([*parents, each]) for each in close],
        [path for path in paths if path.rpartition(".")[2] == wrong],
        [path for path in paths if path.replace(".", "_") == wrong],
    )
    near = [*dict.fromkeys(next((paths for paths in found if paths), ()))][:3]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _models(tree: type[Config], key: str) -> list[type[Config]]:
    section = ".".join(part for part in key.split(".") if not part.isdigit())
    return [model for path, model in _sections(tree) if path == section]


def _sections(tree: type[Config]) -> list[tuple[str, type[Config]]]:
    below = [(key.path, model) for key in keys(tree) for model in key.sections]
    return [("", tree), *((re.sub(r"\[\w*\]", "", path), model) for path, model in below)]


Tree = TypeVar("Tree", bound=Config)


class ConfigError(ValueError):
    """The user's configuration is wrong. The message names the place and the change to make."""


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML file and apply ``key.sub=value`` overrides. Raises ``ConfigError``."""
    return load_as(RunConfig, path, overrides)


def parse(data: dict[str, Any], source: str = "config") -> RunConfig:
    """Validate a run's plain tree. Raises ``ConfigError`` with one line for all mistakes."""
    return parse_as(RunConfig, data, source)


def load_as(tree: type[Tree], path: Path, overrides: Sequence[str] = ()) -> Tree:
    """Like ``load``, for any configuration tree."""
    script = tree is RunConfig and path.suffix in (*SCRIPTS, ".py")
    start = f"; a launch script of verl or TRL: rollpacker init --from {path}" if script else ""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {words_of(error)}{start}") from None
    if data is None:
        hint = "; rollpacker init writes a first job file" if tree is RunConfig else ""
        raise ConfigError(f"{path}: holds no keys{hint}")
    if not isinstance(data, dict):
        found = f"expected keys and values, found {type(data).__name__}{start}"
        raise ConfigError(f"{path}: {found}")
    merged = _override(cast(dict[str, Any], data), overrides)
    return _validated(tree, merged, lambda key: _set_by(key, path, overrides))


def parse_as(
    tree: type[Tree], data: dict[str, Any], source: str = "config", overrides: Sequence[str] = ()
) -> Tree:
    """Like ``parse``, for any configuration tree, with ``overrides`` as for ``load``."""
    return _validated(tree, _override(dict(data), overrides), lambda _key: source)


def _validated(tree: type[Tree], data: dict[str, Any], source: Callable[[str], str]) -> Tree:
    try:
        return tree.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_sentence(mistakes(tree, error), source)) from None


def _one_sentence(found: Mapping[str, str], source: Callable[[str], str]) -> str:
    by_source: dict[str, list[str]] = {}
    for key, text in found.items():
        by_source.setdefault(source(key), []).append(text)
    return "; ".join(f"{where}: {'; '.join(those)}" for where, those in by_source.items())


def _set_by(key: str, path: Path, overrides: Sequence[str]) -> str:
    for item in reversed(overrides):
        given = item.partition("=")[0]
        if f"{key}.".startswith(f"{given}.") or given.startswith(f"{key}."):
            return f"override {item!r}"
    return str(path)


def _override(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {item!r}: expected key.sub=value")
        *parents, leaf = key.split(".")
        node = data
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        try:
            node[leaf] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {item!r}: {words_of(error)}") from None
    return data
