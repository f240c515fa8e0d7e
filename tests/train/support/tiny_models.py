"""Tiny real models, and groups sampled from them."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollpacker.core.types import AttemptId, Group, PromptId, Sample
from rollpacker.train.algorithms import build

VOCABULARY = 23
MAX_LENGTH = 40
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
FAMILIES = ("qwen2", "qwen3", "llama")


def make_model(family="qwen2", seed=0, **changes):
    """A small random model of a family."""
    torch.manual_seed(seed)
    sizes = _SIZES | changes
    match family:
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=False))
        case _:
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(
                0.1 * torch.randn_like(parameter)
            )
    return model.eval()


def make_tokenizer():
    """A word-level tokenizer with one word per id."""
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def naive_logprobs(model, prompt, tokens, temperature=1.0):
    """Log-probabilities (T,) of a response, by transformers' own forward of one sequence."""
    ids = torch.tensor(np.concatenate((prompt, tokens)), dtype=torch.long)[None]
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def padded_logprobs(model, pairs, temperature=1.0):
    """``naive_logprobs`` of prompts and responses, by one forward: nothing reads the zeros behind
    a sequence."""
    whole = [torch.tensor(np.concatenate(pair), dtype=torch.long) for pair in pairs]
    ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    logits = model(input_ids=ids).logits[:, :-1].float() / temperature
    chosen = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[:, :, 0]
    starts = [len(prompt) - 1 for prompt, _ in pairs]
    ends = [start + len(tokens) for start, (_, tokens) in zip(starts, pairs, strict=True)]
    return [row[a:b] for row, a, b in zip(chosen, starts, ends, strict=True)]


def make_groups(model, algorithm, *, count=5, size=4, seed=1, off=0.0, old=False, temperature=1.0):
    """Groups of random responses; sampler logprobs are the model's, plus noise of scale ``off``;
    with ``old`` the weights have changed since.

    The last group has equal rewards.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for g in range(count):
        prompt = rng.integers(2, VOCABULARY, rng.integers(3, 9)).astype(np.int32)
        for i in range(size):
            length = 1 if (g, i) == (0, 0) else int(rng.integers(2, MAX_LENGTH))
            tokens = rng.integers(1, VOCABULARY, length).astype(np.int32)
            noise = off * rng.standard_normal(length)
            drawn.append((prompt, tokens, noise, 1.0 if g == count - 1 else float(rng.random())))
    with torch.no_grad():
        all_exact = padded_logprobs(model, [each[:2] for each in drawn], temperature)
    found = iter(zip(drawn, [exact.numpy() for exact in all_exact], strict=True))
    groups, parts = [], []
    for g in range(count):
        samples = []
        for i in range(size):
            (prompt, tokens, noise, reward), exact = next(found)
            logprobs = (exact + noise).astype(np.float32)
            samples.append(
                Sample(
                    prompt=PromptId(f"p{g}"),
                    index=i,
                    attempt=AttemptId(g * size + i),
                    prompt_tokens=prompt,
                    tokens=tokens,
                    logprobs=logprobs,
                    old_logprobs=logprobs if old else None,
                    finish_reason="stop",
                    weights_version=0,
                    reward=reward,
                )
            )
        rewards = np.array([s.reward for s in samples])
        lengths = np.array([len(s.tokens) for s in samples])
        parts.append(algorithm.reward(rewards, lengths, MAX_LENGTH))
        groups.append(samples)
    return [
        Group(prompt=samples[0].prompt, samples=tuple(samples), advantages=advantages)
        for samples, advantages in zip(groups, algorithm.batch_advantages(parts), strict=True)
    ]


def mask(sample, chosen):
    """The response with ``chosen`` tokens sampled, and the others put in by an environment."""
    chosen = np.asarray(chosen, bool)
    old = sample.old_logprobs
    return replace(
        sample,
        loss_mask=chosen,
        logprobs=np.where(chosen, sample.logprobs, np.float32(0)),
        old_logprobs=None if old is None else np.where(chosen, old, np.float32(0)),
    )


def _with_environment(number, sample):
    places, length = np.arange(len(sample.tokens)), len(sample.tokens)
    match number % 6:
        case 0:
            return sample
        case 1:  # begins behind the prompt
            return mask(sample, places >= length // 3)
        case 2:  # ends with what was put in
            return mask(sample, places < (length + 1) // 2)
        case 3:
            return mask(sample, places % 5 < 3)
        case 4:
            return mask(sample, places < 0)
        case _:
            return mask(sample, places == length // 2)


def with_environment(groups):
    """The same groups with tokens of an environment anywhere in most of the responses."""
    numbers = iter(range(sum(len(group.samples) for group in groups)))
    return [
        replace(g, samples=tuple(_with_environment(next(numbers), s) for s in g.samples))
        for g in groups
    ]


def clone(model):
    """A model with its own storage."""
    return copy.deepcopy(model)


def group_batch(model, config, **options):
    """Groups with the advantages of an algorithm's configuration."""
    return make_groups(model, build(config), **options)
