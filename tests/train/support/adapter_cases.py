"""Every adapter kind of the installed peft, and options of theirs: sampler against trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import Qwen2Config, Qwen2ForCausalLM

from case_files import read_table
from rollpacker.config import MiniEngineConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Engine, Output, Request, SamplingParams
from rollpacker.engine.mini import MiniEngine
from rollpacker.train.model.adapters import (
    bare_copy,
    check_adapted,
    check_config,
    check_kind,
    merged_weights,
)

VOCABULARY = 101
WORST = 1e-5
"""Nats that the sampler may be off, in float32."""
LINEAR = ["q_proj", "k_proj", "down_proj"]
_TOKENS = {"num_virtual_tokens": 3}

SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1},
    "BEFT": {"target_modules": ["k_proj", "v_proj"]},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "CARTRIDGE": _TOKENS,
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 1]},
    "FOURIERFT": {"n_frequency": 50},
    "GRALORA": {"r": 4, "gralora_k": 2},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "post_attention_layernorm", "norm"]},
    "MULTITASK_PROMPT_TUNING": _TOKENS | {"num_tasks": 1},
    "OFT": {"oft_block_size": 8},
    "P_TUNING": _TOKENS | {"encoder_hidden_size": 16},
    "PREFIX_TUNING": _TOKENS,
    "PROMPT_TUNING": _TOKENS,
    "TRAINABLE_TOKENS": {"token_indices": [5, 6, 7]},
    "VBLORA": {"vector_length": 16, "num_vectors": 8},
    "WAVEFT": {"n_frequency": 50},
}
"""What a kind needs, beside ``LINEAR`` for those that take modules."""

OPTIONS: dict[str, tuple[bool, dict[str, Any]]] = read_table(__file__, "options")
"""Options of LoRA: whether embeddings are tied, and what is asked for."""


@dataclass(frozen=True)
class Measured:
    """What came of it.

    Args:
        refused: why, in one line; None where the adapter was merged.
        worst: largest difference of a log-probability between sampler and trainer, nats.
        changed: between the trained and the base model.
    """

    refused: str | None
    worst: float = 0.0
    changed: float = 0.0


def build(tied: bool = False) -> Any:
    """A model with heads that vLLM's attention for CPUs has."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(std=0.1)
    return model


def config_of(kind: PeftType) -> Any:
    """An adapter of a kind on some linear layers. Raises what peft raises."""
    made = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    own = SETTINGS.get(kind.value, {})
    takes = "target_modules" in made.__dataclass_fields__ and kind.value != "TRAINABLE_TOKENS"
    modules = {"target_modules": LINEAR} if takes and not _TOKENS.keys() & own.keys() else {}
    return made(task_type="CAUSAL_LM", **(modules | own))


def option_of(name: str) -> tuple[bool, LoraConfig]:
    """LoRA with one of ``OPTIONS``."""
    tied, own = OPTIONS[name]
    given: dict[str, Any] = {"target_modules": LINEAR, "task_type": "CAUSAL_LM"} | own
    return tied, LoraConfig(**given)


def move(model: Any) -> None:
    """Change all that is trained."""
    kinds = {config.peft_type.value for config in model.peft_config.values()}
    size = min(_STEPS.get(kind, _STEP) for kind in kinds)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn_like(parameter))


_STEP = 0.05
_STEPS = {"RANDLORA": 0.01}
"""Of what is trained, standard deviations; it adds up so many bases that the usual one makes
weights ten times as large, and rounding with them."""

Decoder = Callable[[torch.nn.Module], Engine]
"""An engine for an adapted model, without its adapters' weights."""


def mini(base: Any) -> Engine:
    """The built-in engine."""
    return MiniEngine(bare_copy(base), config=MiniEngineConfig(max_running=4, kv_tokens=512))


def measure_kind(kind: PeftType, engine: Decoder) -> Measured:
    """One of peft's kinds; what is refused by its name is not even made."""
    try:
        check_kind(kind.value)
    except ValueError as error:
        return Measured(str(error))
    return measure(config_of(kind), engine)


def measure(config: Any, engine: Decoder, *, tied: bool = False) -> Measured:
    """Adapt, refuse or train and sample; log-probabilities of both in float32."""
    try:
        check_config(config, tied)
    except ValueError as error:
        return Measured(str(error))
    adapted = adapt(build(tied), config)
    try:
        check_adapted(adapted)
    except ValueError as error:
        return Measured(str(error))
    move(adapted)
    return compare(adapted, build(tied), engine)


def adapt(base: Any, config: Any) -> Any:
    """The model with an adapter, the same one each time."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(2)
        return get_peft_model(base, config)


def compare(adapted: Any, plain: torch.nn.Module, engine: Decoder) -> Measured:
    """The sampler's log-probabilities with the trainer's: in its own mode, that of training."""
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    sampler = engine(adapted.get_base_model())
    sampler.load_weights(merged_weights(adapted.get_base_model()), 1)
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    worst = changed = 0.0
    adapted.train()
    for output, prompt in sampled(sampler):
        told = trainers(adapted, prompt, output.tokens)
        worst = max(worst, float(np.abs(told - output.logprobs).max()))
        changed = max(changed, float(np.abs(told - trainers(plain, prompt, output.tokens)).max()))
    return Measured(None, worst, changed)


def sampled(engine: Engine) -> Iterator[tuple[Output, np.ndarray]]:
    """Some responses."""
    prompts = [
        np.random.default_rng(n).integers(2, VOCABULARY, 8).astype(np.int32) for n in range(3)
    ]
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_stop=True)
    engine.submit(
        [
            Request(
                attempt=AttemptId(n), group=PromptId(f"g{n}"), prompt=ids, params=params, seed=n
            )
            for n, ids in enumerate(prompts)
        ]
    )
    while engine.busy():
        for output in engine.step():
            yield output, prompts[output.attempt]


@torch.no_grad()
def trainers(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities of a response, shape (T,)."""
    ids = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), -1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
