"""The scheduler's view of a device: run rows, sample, copy blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollpacker.engine.base import Floats, Ints
from rollpacker.engine.sampling.race import RowDraws

if TYPE_CHECKING:
    from transformers import PreTrainedModel


SUPPORTED = ("llama", "qwen2", "qwen3")  # values of ``model_type`` that the built-in engine runs
_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder. ``heads`` is a multiple of ``kv_heads``."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    context: int
    eps: float
    scale: float


def check_family(kind: str) -> None:
    """Raise ``ValueError`` for a ``model_type`` that the built-in engine does not run."""
    if kind not in SUPPORTED:
        raise ValueError(
            f"engine.kind=mini runs {', '.join(SUPPORTED)} models, not {kind!r}: "
            "engine.kind=vllm may run it"
        )


def shape_of(model: PreTrainedModel) -> Shape:
    """Read the shape from the model's config. Raises ``ValueError`` on what mini cannot run."""
    config: Any = model.config
    kind = config.model_type
    names = [name for name, _ in model.named_parameters()]
    if any(".base_layer." in name or ".original_module." in name for name in names):
        raise ValueError(
            "engine.kind=mini decodes from plain weights, and this model has adapters: give it a "
            "copy without them (rollpacker.train.model.adapters)"
        )
    check_family(kind)
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            "engine.kind=mini has no sliding-window attention: engine.kind=vllm has it"
        )
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"engine.kind=mini needs hidden_act silu, not {config.hidden_act!r}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in _LENGTH_DEPENDENT:
        raise ValueError(f"engine.kind=mini cannot run rope_type {rope!r}, which depends on length")
    decoder: Any = model.get_decoder()
    attention = decoder.layers[0].self_attn
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        context=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        scale=attention.scaling,
    )


@torch.no_grad()
def rope_tables(model: PreTrainedModel, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the model's own rotary embedding, each (context, head_dim) float32."""
    device = next(model.parameters()).device
    rotary: Any = model.get_decoder().rotary_emb
    like = torch.zeros(1, dtype=torch.float32, device=device)
    cos, sin = rotary(like, torch.arange(context, device=device)[None])
    return cos[0].contiguous(), sin[0].contiguous()


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy a checkpoint into the model in place. Tensors that share its memory are skipped. Raises
    ``ValueError`` if the names are not the model's."""
    parameters = dict(model.named_parameters())
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
    missing = set(parameters)
    for name, tensor in weights:
        if name in parameters:
            if parameters[name].data_ptr() != tensor.data_ptr():
                parameters[name].copy_(tensor)
            missing.discard(name)
        elif name not in tied:
            raise ValueError(f"weights hold {name!r}, which the model lacks")
    if missing:
        raise ValueError(f"weights lack {sorted(missing)[0]!r} ({len(missing)} missing in all)")


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens to run, each (n,). Rows of one sequence are in order of their positions.

    Args:
        slots: row of the block tables.
        keep: (m,) rows whose last hidden state is wanted.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    keep: Ints


class Runner(Protocol):
    """A model on a device with its KV blocks. Hidden states stay in the device's own arrays."""

    block_size: int
    exact: bool
    """A row's results do not depend on the rest of the batch, bit by bit."""

    equal_rows: bool
    """Sequences with several rows each run together only if all have the same number."""

    def kv_bytes(self) -> int: ...

    def free_bytes(self, sharers: int) -> int:
        """Free memory of the device, as one of ``sharers`` processes may use it."""
        ...

    def allocate(self, blocks: int) -> None:
        """Allocate the KV blocks, zeroed."""

    def release(self) -> None: ...

    def refresh(self, *, force: bool = False) -> None: ...

    def copy_block(self, source: int, target: int) -> None: ...

    def forward(self, rows: TokenRows, tables: Ints) -> Any:
        """Normed last hidden states (m, hidden) of the rows to keep."""
        ...

    def join(self, parts: list[Any]) -> Any:
        """Hidden states (k, hidden) of several calls in one array."""
        ...

    def sample(self, hidden: Any, rows: Ints, draws: RowDraws) -> tuple[Ints, Floats]:
        """Tokens and logprobs, each (d,), drawn from the hidden states in ``rows`` (d,)."""
        ...
