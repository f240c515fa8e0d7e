"""What a forward and backward over one micro-batch hold for a while: estimates, in bytes.

Activations are counted as transformers' layers save them, logits and the head's gradient as
``train/model/token_logprobs.py`` makes them; allocators round up, and kernels have workspaces of
their own.
"""

from __future__ import annotations

from rollpacker.config import RunConfig
from rollpacker.sim.costs.decoder_layers import DecoderLayer
from rollpacker.sim.costs.models import ModelShape

LOGITS = 1 << 25
"""Logits that ``train/model/token_logprobs.py`` holds at a time."""
_LOGIT_BYTES = 12
"""Log-probabilities, probabilities and their gradient, in float32."""

_DRAW_BYTES = 36
"""Logits, scaled and as log-probabilities in float32; those, probabilities and sums in float64."""


def _size(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def layer_token_bytes(
    config: RunConfig, shape: ModelShape, layer: DecoderLayer, *, cuda: bool
) -> float:
    """Saved for the backward pass: of one token, in one of the model's layers."""
    size, hidden, inner = _size(config), shape.hidden, layer.inner
    # Inputs of two norms, in float32 and scaled; of the gated MLP what its products are made of.
    kept = size * (2 * hidden + 3 * inner) + 8 * hidden
    # Each expert has an input and an output of its own.
    kept += size * 2 * hidden * layer.routed
    rank, adapted = config.model.lora_rank, shape.adapted(layer)
    if rank and size == 2:
        # Adapters are float32: each of them has a cast input of its own.
        kept += 4 * sum(columns for _, columns in adapted)
        kept += size * (hidden + inner) if shape.count.experts else 0
    else:
        kept += size * (2 * hidden + layer.output + inner)
    # Attention is computed in float32 on a CPU.
    attention = (size if cuda else 4) * layer.mixed
    return kept + attention + 4 * layer.normed + len(adapted) * 4 * rank


def activations(config: RunConfig, shape: ModelShape, tokens: int, *, cuda: bool) -> float:
    """Saved of all layers, or with checkpointing their inputs and one layer's."""
    each = {b: layer_token_bytes(config, shape, b, cuda=cuda) for b in {*shape.blocks}}
    ends = (2 * _size(config) + 4) * shape.hidden * tokens
    if not config.train.gradient_checkpointing:
        return sum(each[block] for block in shape.blocks) * tokens + ends
    inputs = shape.layers * _size(config) * shape.hidden * tokens
    return inputs + max(each.values()) * tokens + ends


def backward(config: RunConfig, shape: ModelShape, tokens: int, *, cuda: bool) -> float:
    """At its highest: the loss has been computed and nothing has been given back."""
    saved = activations(config, shape, tokens, cuda=cuda)
    return saved + _logits(config, shape, tokens) + _head(config, shape, tokens)


def forward(config: RunConfig, shape: ModelShape, tokens: int, *, cuda: bool) -> float:
    """Without gradients: one layer's activations, and logits."""
    layer = max(layer_token_bytes(config, shape, each, cuda=cuda) for each in {*shape.blocks})
    return layer * tokens + _logits(config, shape, tokens)


def gathered(shape: ModelShape, size: int) -> float:
    """Whole weights that a process of a spread replica holds while it computes, and gradients.

    Embedding and head stay until the backward pass ends, layers come one ahead; gradients are
    added up in float32.
    """
    ends, layer = shape.ends, shape.largest_layer
    return size * (ends + 2 * layer) + 4 * max(ends, layer)


def decoding(shape: ModelShape, running: int, cache: float) -> float:
    """A step of the built-in engine on a GPU with ``running`` responses that fill ``cache`` bytes.

    It gathers a layer's keys and values, which attention spreads over all heads, and draws from
    probabilities in float64.
    """
    layer = cache / shape.layers * (1 + shape.heads / max(1, shape.kv_heads))
    return layer + drawing(shape, running)


def drawing(shape: ModelShape, running: int) -> float:
    """The next tokens of so many responses: all of their probabilities, in float64."""
    return _DRAW_BYTES * running * shape.vocabulary


def _logits(config: RunConfig, shape: ModelShape, tokens: int) -> float:
    rows = min(tokens, max(1, LOGITS // shape.vocabulary))
    narrow = 2 if _size(config) == 2 else 0
    return (_LOGIT_BYTES + narrow) * rows * shape.vocabulary


def _head(config: RunConfig, shape: ModelShape, tokens: int) -> float:
    """The gradient of the output head: a chunk's, and in float32 the sum of several."""
    if config.model.lora_rank:
        return 0.0
    narrow = 2 if _size(config) == 2 else 0
    several = 4 if tokens * shape.vocabulary > LOGITS else 0
    return (4 + narrow + several) * shape.embedding
