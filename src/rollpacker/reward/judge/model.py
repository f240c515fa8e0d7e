"""The judge's model: loaded once, asked in batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from rollpacker.hub import model_arguments
from rollpacker.policy.grading import JudgeBudget, JudgeModel, JudgePlan
from rollpacker.response_text import ResponseText
from rollpacker.reward.judge.options import JudgeOptions, JudgePrompt, Planner, capped, make_parser
from rollpacker.reward.judge.streamed import SUPPORTED, CausalModel, StreamedModel, WholeModel

# Token ids in, answers out: differences of two logits, or greedy text.


def logit_differences(
    model: CausalModel, prompts: Sequence[Sequence[int]], yes: int, no: int
) -> list[float]:
    """Return ``logit(yes) - logit(no)`` of the token after each prompt, in nats."""
    # With padding behind the prompts, causal attention needs no mask, and the fast kernels apply.
    ids, _ = _padded(model, prompts, "right")
    at = torch.tensor([len(prompt) - 1 for prompt in prompts], device=model.device)
    logits = model.logits(ids, at).float()
    return (logits[:, yes] - logits[:, no]).tolist()


def greedy(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop: Collection[int],
    max_new_tokens: int,
) -> list[list[int]]:
    """Decode each prompt greedily, up to a ``stop`` token."""
    ids, mask = _padded(model, prompts, "left")
    cache = DynamicCache(config=model.config)
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    for _ in range(max_new_tokens):
        at = torch.full((len(prompts),), ids.shape[1] - 1, device=model.device)
        chosen = model.logits(ids, at, mask, cache).argmax(-1)
        for row, token in enumerate(chosen.tolist()):
            if token in stop:
                running.discard(row)
            elif row in running:
                answers[row].append(token)
        if not running:
            break
        ids = chosen.unsqueeze(1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
    return answers


def _padded(
    model: CausalModel, prompts: Sequence[Sequence[int]], side: str
) -> tuple[Tensor, Tensor]:
    texts = [torch.tensor(prompt, dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(texts, batch_first=True, padding_side=side)
    ones = [torch.ones_like(text) for text in texts]
    mask = pad_sequence(ones, batch_first=True, padding_side=side)
    return ids.to(model.device), mask.to(model.device)


# Bytes and seconds that a judge needs, measured when it starts.

_PROBE_TOKENS = 512
_REPEATS = 3


def measure(model: StreamedModel, *, cached: bool) -> JudgeModel:
    """Measure the numbers of ``JudgeBudget``: a few hundred tokens in one layer, and a layer's
    copy."""
    limit = getattr(model.config, "max_position_embeddings", _PROBE_TOKENS)
    tokens = min(_PROBE_TOKENS, limit)
    ids = torch.zeros((1, tokens), dtype=torch.long, device=model.device)
    model.keep(1)  # the first layer: its compute is timed without copies
    model.hidden(ids, layers=1)
    before = _allocated(model.device)
    seconds = _shortest(lambda: model.hidden(ids, layers=1), model.device)
    cuda = model.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(model.device) if cuda else 0
    activations = (peak - before) / tokens
    if activations <= 0:  # of one layer: the residual stream, its norm and attention, the gated MLP
        width = 8 * model.config.hidden_size + 3 * model.config.intermediate_size
        activations = width * model.dtype.itemsize
    return JudgeModel(
        layers=model.layers,
        layer_bytes=model.store.layer_bytes,
        fixed_bytes=model.fixed_bytes,
        token_bytes=activations + (_cache_bytes(model) if cached else 0.0),
        token_seconds=seconds / tokens,
        copy_seconds=_shortest(model.store.copy_once, model.device),
    )


def free_bytes(model: StreamedModel, most: float | None) -> float:
    """Return the device memory that the judge may use: free and held bytes, at most ``most``."""
    held = model.store.held_bytes + model.fixed_bytes
    if model.device.type != "cuda":
        assert most is not None
        return most
    unused = torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    free = torch.cuda.mem_get_info(model.device)[0] + unused + held
    return free if most is None else min(free, most)


def _shortest(call: Callable[[], object], device: torch.device) -> float:
    shortest = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _cache_bytes(model: StreamedModel) -> float:
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * model.layers * config.num_key_value_heads * head * model.dtype.itemsize


_GB = 1e9


class ModelAsker:
    """Scores prompts with a model of its own. Raises ``ValueError``, in one line, if the model
    cannot be loaded or used as asked."""

    def __init__(self, options: JudgeOptions, template: JudgePrompt) -> None:
        self._options = options
        torch.set_num_threads(options.threads)
        device = _device(options.device)
        loaded, self._tokenizer = _load(options)
        self._stop = _stop_ids(loaded, self._tokenizer)
        self._read = ResponseText.of(self._tokenizer, self._stop)
        self.max_tokens = _context(loaded, options)
        self._chat = _chat(options.chat, template, self._tokenizer)
        self._answers = _answer_tokens(options, template, self._tokenizer)
        self._parse = make_parser(options.parser, options.low, options.high)
        self._model = _placed(loaded, device, options)
        self._plan = capped(_planner(self._model, options), options.batch_tokens)

    def encode(self, text: str) -> list[int]:
        """Return the prompt's tokens, within the chat template if it is a chat turn."""
        if self._chat:
            turn = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(
                turn,
                add_generation_prompt=True,
                tokenize=False,
                **self._options.chat_template_kwargs,
            )
        # A chat template already writes the special tokens.
        return self._tokenizer(text, add_special_tokens=not self._chat)["input_ids"]

    def plan(self, lengths: Sequence[int]) -> JudgePlan | None:
        """Return the concurrency and resident layers for waiting prompts of these lengths,
        ascending."""
        return self._plan([length + _new_tokens(self._options) for length in lengths])

    def ask(self, prompts: Sequence[list[int]], resident: int) -> list[float | None]:
        """One score each, or None if the judge's answer is no grade. Raises ``MemoryError`` if the
        device has no room for the batch."""
        with _out_of_memory(self._model.device):
            self._model.keep(resident)
            if self._options.mode == "logits":
                yes, no = self._answers
                differences = logit_differences(self._model, prompts, yes, no)
                return [difference_score(each, self._options) for each in differences]
            ids = greedy(
                self._model,
                prompts,
                stop=self._stop,
                max_new_tokens=self._options.max_new_tokens,
            )
        return [self._parse(self._read(each)) for each in ids]


def difference_score(difference: float, options: JudgeOptions) -> float | None:
    """Return the score of a difference of logits (nats), or None if it is NaN."""
    if math.isnan(difference):
        return None
    beyond = difference - options.threshold
    if options.score == "threshold":
        return float(beyond > 0.0)
    return 0.5 * (1.0 + math.tanh(0.5 * beyond))


@contextmanager
def _out_of_memory(device: torch.device) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError(str(error)) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("judge: device: cuda, but torch sees no CUDA device: set device: cpu")
    return torch.device(name)


def _load(options: JudgeOptions) -> tuple[Any, Any]:
    assert options.model is not None
    try:
        place: dict[str, Any] = model_arguments(options.model)
    except ValueError as error:
        raise ValueError(f"judge: model={options.model}: {error}") from None
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=options.dtype)
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except (OSError, ValueError, SafetensorError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"judge: model={options.model}: {first}") from error
    return model, tokenizer


def _stop_ids(model: Any, tokenizer: Any) -> set[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = {*(configured if isinstance(configured, list) else [configured])}
    return {i for i in found | {tokenizer.eos_token_id} if i is not None}


def _new_tokens(options: JudgeOptions) -> int:
    return options.max_new_tokens if options.mode == "generate" else 0


def _context(model: Any, options: JudgeOptions) -> int:
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = context and context - _new_tokens(options)
    limits = [limit for limit in (options.max_tokens, context) if limit]
    if not limits or min(limits) < 1:
        raise ValueError(f"judge: model={options.model}: no context known: set max_tokens")
    return min(limits)


def _chat(chosen: bool | None, template: JudgePrompt, tokenizer: Any) -> bool:
    if chosen and not tokenizer.chat_template:
        raise ValueError("judge: the model's tokenizer has no chat template: set chat: false")
    return chosen if chosen is not None else template.chat and bool(tokenizer.chat_template)


def _answer_tokens(options: JudgeOptions, template: JudgePrompt, tokenizer: Any) -> tuple[int, int]:
    texts = (
        template.yes if options.yes is None else options.yes,
        template.no if options.no is None else options.no,
    )
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    if not all(ids) or ids[0][0] == ids[1][0]:
        raise ValueError(
            f"judge: the answers {texts[0]!r} and {texts[1]!r} do not begin with different tokens "
            "of the model: change yes or no"
        )
    return ids[0][0], ids[1][0]


def _placed(model: Any, device: torch.device, options: JudgeOptions) -> CausalModel:
    streamable = model.config.model_type in SUPPORTED
    if options.resident == "all" or (options.resident == "auto" and not streamable):
        return WholeModel(model, device)
    return StreamedModel(model, device)


def _planner(model: CausalModel, options: JudgeOptions) -> Planner:
    most = None if options.memory_gb is None else options.memory_gb * _GB
    adaptive = model.device.type == "cuda" or most is not None
    if isinstance(model, StreamedModel) and options.resident == "auto" and adaptive:
        budget = JudgeBudget(
            measure(model, cached=options.mode == "generate"), options.max_concurrency
        )
        return lambda lengths: budget.decide(lengths, free_bytes(model, most))
    resident = options.resident if isinstance(options.resident, int) else model.layers
    fixed = JudgePlan(concurrency=options.max_concurrency, resident=resident)
    return lambda _: fixed
