"""Checks of a configuration as a whole, before any process starts."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollpacker.config import RunConfig
from rollpacker.config.rollout import StaleTokens, TailBatchingConfig
from rollpacker.engine.mini.runner import check_family
from rollpacker.policy.rounds.rule import own_rule
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.train import algorithms
from rollpacker.train.model.loading import Card
from rollpacker.train.state.checkpoint import older_fields


def races(config: RunConfig) -> bool:
    """Whether a round keeps the first to finish."""
    return config.rollout.tail_batching.races is not None


def check(config: RunConfig) -> None:
    """Refuse combinations that cannot work. Raises ``ValueError``."""
    tail = config.rollout.tail_batching
    mode = tail.mode
    own_rule(tail)
    if races(config) and config.grading.asynchronous is False:
        raise ValueError(
            f"grading.asynchronous=false cannot work with rollout.tail_batching.mode={mode}: "
            "a race needs each reward when its response ends: use mode 'exact' or 'off'"
        )
    if tail.races == "responses" and any(reward.needs_group for reward in config.rewards):
        raise ValueError(
            "a reward with needs_group compares all responses of a prompt, and "
            f"rollout.tail_batching.mode={mode} may abort some: use 'exact', 'off' or 'prompts'"
        )
    if tail.long_round_steps > 1 and config.train.updates_per_step > 1:
        raise ValueError(
            "rollout.tail_batching.long_round_steps and train.updates_per_step both split a round "
            "into updates: leave one of them at 1"
        )
    if config.checkpoint.best and not (config.eval is not None and config.eval.every):
        raise ValueError(
            f"checkpoint.best={config.checkpoint.best} chooses by evaluations: set eval.every and "
            "eval.data or eval.fraction, or leave it empty"
        )
    if config.deterministic and config.engine.kind == "vllm":
        raise ValueError(
            "deterministic: true needs engine.kind=mini: vLLM's result for a response depends on "
            "the other responses in its batch"
        )
    if config.rollout.planner != "off" and config.engine.kind != "vllm":
        raise ValueError(
            f"rollout.planner={config.rollout.planner} is for engines that can span several "
            "devices: take engine.kind=vllm, or leave it at 'off'"
        )
    _check_turns(config)
    _check_group(config)
    _check_environment(config)
    _check_partial(config)


def _check_turns(config: RunConfig) -> None:
    if (asked := config.devices.turns) in ("auto", "off"):
        return
    others = {
        f"engine.kind={config.engine.kind}": config.engine.kind != "vllm",
        f"rollout.planner={config.rollout.planner}": config.rollout.planner != "off",
        "mux.url": bool(config.mux.url),
        "devices.emulate": config.devices.emulate is not None and asked == "both",
    }
    for other, clashes in others.items():
        if clashes:
            raise ValueError(
                f"devices.turns={asked} does not go with {other}: leave one of them out"
            )


def _check_partial(config: RunConfig) -> None:
    tail = config.rollout.tail_batching
    if not tail.carries:
        return
    key = "rollout.tail_batching.mode=partial"
    if config.environment is not None:
        raise ValueError(
            f"{key} and environment: a response that goes on in a later step would lose its "
            "conversation: use another mode"
        )
    if config.devices.emulate is not None:
        raise ValueError(f"{key} and devices.emulate: emulated devices start every response anew")
    if tail.long_round_steps > 1:
        raise ValueError(f"{key} has no long rounds: leave long_round_steps at 1")
    if config.deterministic and (config.devices.per_node != 1 or config.devices.nodes != 1):
        raise ValueError(
            f"{key} and deterministic: the weights of a token depend on the time at which other "
            "engines are stopped: set devices.per_node to 1"
        )
    correction = config.train.sampler_correction
    if tail.stale_tokens == "mask" and correction.kind != "none" and correction.level != "token":
        raise ValueError(
            "rollout.tail_batching.stale_tokens=mask leaves out tokens that the ratio of a "
            "response needs: set train.sampler_correction.level to token, not "
            f"{correction.level}"
        )
    if stale_tokens(config) == "ratio":
        _check_ratio(config, key)


def _check_ratio(config: RunConfig, key: str) -> None:
    other = "set rollout.tail_batching.stale_tokens to 'mask', or a train.sampler_correction"
    kind = config.train.algorithm.kind
    if algorithms.build(config.train.algorithm).sequence_level:
        raise ValueError(
            f"{key} with train.algorithm.kind={kind}: the algorithm has one ratio for a "
            f"whole response, and clips many responses of weights several steps old: {other}"
        )
    if not config.rollout.full_softmax:
        raise ValueError(
            f"{key} compares with the probabilities of earlier weights over the whole softmax: set "
            f"rollout.top_p to 1 and rollout.top_k to 0, or {other}"
        )


def stale_tokens(config: RunConfig) -> StaleTokens:
    """The effective rule for tokens of earlier weights."""
    tail = config.rollout.tail_batching
    corrected = config.train.sampler_correction.kind != "none"
    if not tail.carries or (tail.stale_tokens == "ratio" and corrected):
        return "fresh"
    return tail.stale_tokens


def _check_environment(config: RunConfig) -> None:
    environment = config.environment
    if environment is None:
        return
    if config.devices.emulate is not None:
        raise ValueError(
            "environment and devices.emulate: emulated devices sample no text that an environment "
            "could answer: drop one of them"
        )
    if config.data.chat is False:
        raise ValueError(
            "environment needs chat messages, and data.chat is false: leave it unset, with a model "
            "that has a chat template"
        )
    total, most = environment.max_total_tokens, config.rollout.max_completion_length
    if total and most and total < most:
        raise ValueError(
            f"environment.max_total_tokens={total} is less than rollout.max_completion_length="
            f"{most}, the limit of sampled tokens alone: raise it, or lower the other"
        )


def _check_group(config: RunConfig) -> None:
    """Refuse groups of one response if the algorithm compares responses with each other."""
    if config.rollout.num_generations > 1:
        return
    algorithm = algorithms.build(config.train.algorithm)
    length = np.ones(1, np.int64)
    groups = [algorithm.reward(np.full(1, r), length, 1) for r in (0.0, 1.0)]
    if not any(np.any(group) for group in algorithm.batch_advantages(groups)):
        raise ValueError(
            "rollout.num_generations=1 trains nothing: train.algorithm.kind="
            f"{config.train.algorithm.kind} compares the responses of a prompt with each other: "
            "set 2 or more, such as 8"
        )


def check_context(config: RunConfig, context: int) -> None:
    """Raise ``ValueError`` if responses may fill the whole ``context`` (tokens)."""
    longest = config.rollout.max_completion_length
    total = 0 if config.environment is None else config.environment.max_total_tokens
    if total >= context:
        raise ValueError(
            f"environment.max_total_tokens={total} leaves no room for a prompt in the model's "
            f"context of {context} tokens: lower it"
        )
    if longest is not None and longest >= context:
        raise ValueError(
            f"rollout.max_completion_length={longest} leaves no room for a prompt in the model's "
            f"context of {context} tokens: lower it, or leave it unset for all tokens behind the "
            "longest prompt"
        )


def check_engine(config: RunConfig, kind: str) -> None:
    """Raise ``ValueError`` for a model family that the engine does not run."""
    if config.engine.kind == "mini":
        check_family(kind)


def check_size(config: RunConfig, problems: Problems) -> list[str]:
    """Lines for the user if a step has more prompts than the data. Raises ``ValueError`` if
    ``drop_last`` drops all."""
    count, wanted = len(problems.tokens), config.rollout.prompts_per_step
    if count >= wanted:
        return []
    if config.data.drop_last:
        raise ValueError(
            f"data.drop_last drops everything: {count} prompts are fewer than "
            f"rollout.prompts_per_step={wanted}"
        )
    return [
        f"rollout.prompts_per_step={wanted} is more than the {count} prompts: each step trains on "
        f"at most {count}, and is a whole epoch"
    ]


def check_used(tail: TailBatchingConfig) -> list[str]:
    """Lines for the user on changed options that the mode ignores."""
    return [
        f"rollout.tail_batching.{key}={getattr(tail, key)} has no effect in mode '{tail.mode}', "
        f"only in {' or '.join(map(repr, modes))}"
        for key, modes in tail.unused.items()
    ]


def check_written(config: RunConfig, card: Card) -> list[str]:
    """Lines for the user if checkpoints will differ in format from ``model.path``."""
    said: list[str] = []
    before, now = str(card.config.dtype).removeprefix("torch."), config.model.dtype
    if before not in ("None", now):
        said.append(
            f"model.dtype={now}: the run's checkpoints are in {now}, and model.path is in {before}"
        )
    if older_fields(card.config.to_dict()) is None:
        said.append(
            "model.path: transformers 4 has no fields for its rope_parameters (config.json): load "
            "the run's checkpoints with transformers 5 only"
        )
    return said


def check_tokenizer(card: Card, *problems: Problems | None) -> list[str]:
    """Lines for the user if the tokenizer is larger than the model. Raises ``ValueError`` if
    prompts have a token that the model lacks."""
    rows = card.config.vocab_size
    beyond = [number for number in card.tokenizer.get_vocab().values() if number >= rows]
    if not beyond:
        return []
    most = max(int(each.max()) for part in problems if part for each in part.tokens.values())
    token = card.tokenizer.convert_ids_to_tokens(most if most >= rows else min(beyond))
    said = f"model.path: its tokenizer's '{token}' is beyond the model's vocab_size={rows}"
    if most >= rows:
        raise ValueError(
            f"{said}, and prompts contain it: use the tokenizer that the model was trained with, "
            "or add rows to the model (resize_token_embeddings)"
        )
    return [f"{said}: no response can contain it"]


_SAID = "said5d41402a"
"""A stand-in for a response. No chat template looks for it."""


def check_ends(config: RunConfig, card: Card) -> list[str]:
    """Lines for the user if the model's end tokens are not those of its prompts, so that responses
    may never end by themselves."""
    if config.devices.emulate is not None or config.engine.kind == "fake" or config.rollout.stop:
        return []
    tokenizer: Any = card.tokenizer
    names = [str(tokenizer.convert_ids_to_tokens(id_)) for id_ in card.stop_token_ids]
    known = " or ".join(f"'{name}'" for name in names)
    if not names:
        return [
            "model.path: neither the tokenizer nor the model names an end token, so every response "
            'is cut off: set rollout.stop, such as ["<|endoftext|>"]'
        ]
    closing = _closing(tokenizer, config.model.chat_template_kwargs)
    ids: list[int] = tokenizer(closing, add_special_tokens=False)["input_ids"] if closing else []
    if not ids:
        return []
    if config.data.chat is False:
        if {*card.stop_token_ids} <= {*ids}:
            return [
                f"data.chat is false, but responses end only with {known}, which the model writes "
                "after turns of its chat template: leave data.chat unset, or set rollout.stop"
            ]
        return []
    if {*card.stop_token_ids} & {*ids}:
        return []
    end = _end(tokenizer, closing, ids)
    return [
        f"model.path: its chat template ends a turn with '{end}', but responses end only with "
        f"{known}: if they are cut off, set rollout.stop: ['{end}']"
    ]


def _closing(tokenizer: Any, kwargs: dict[str, Any]) -> str:
    """The chat template's text after an assistant's message. Empty if unknown."""
    if not tokenizer.chat_template:
        return ""
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _SAID}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False, **kwargs)
    except Exception:  # a template is a program; its errors are reported where prompts are encoded
        return ""
    _, found, closing = text.rpartition(_SAID)
    return closing.strip() if found else ""


def _end(tokenizer: Any, closing: str, ids: list[int]) -> str:
    """The special token that closes a turn, or the first line of the text."""
    token = tokenizer.added_tokens_decoder.get(ids[0])
    return str(token) if token is not None else closing.splitlines()[0]
