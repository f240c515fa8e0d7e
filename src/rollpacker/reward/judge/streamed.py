"""Layer-wise execution of a causal language model whose layers are mostly in host memory.

A loop calls the model's own modules with the weights of a ``LayerStore``
(``torch.func.functional_call``), so transformers stays unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

# Decoder layers in host memory, brought to the device just in time (RollPacker, section 4.3): a
# few layers stay on the device, the others are copied into two buffers in turn, each while the
# layer before it computes. On CUDA the host memory is pinned and copies have a stream of their
# own; elsewhere a copy is done when it is asked for.

BUFFERS = 2  # one layer in use and one on its way
_ALIGNMENT = 256  # bytes; what cudaMalloc guarantees and kernels may rely on


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class _Buffer:
    memory: Tensor
    holds: int | None = None
    copied: torch.cuda.Event | None = None
    used: torch.cuda.Event | None = None


class LayerStore:
    """The weights of equal layers, all in host memory, some on the device too.

    Layers must be used in order, and ``begin`` starts over. The modules move to the meta device, so
    they run only with ``weights``. Raises ``ValueError`` if the layers differ.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._parts = _parts(layers[0])
        if any(_parts(layer) != self._parts for layer in layers):
            raise ValueError("judge: the model's layers differ in their weights: set resident: all")
        self.layer_bytes = self._parts[-1].stop
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host = [self._packed(layer) for layer in layers]
        self._order = spread(len(layers))
        self._resident: dict[int, Tensor] = {}
        self._streamed: list[int] = []
        self._buffers: list[_Buffer] = []
        self.keep(0)

    @property
    def held_bytes(self) -> int:
        return (len(self._resident) + len(self._buffers)) * self.layer_bytes

    @torch.no_grad()
    def keep(self, resident: int) -> None:
        """Keep ``resident`` layers on the device, spread evenly over the model."""
        if self._in_place(resident):
            return
        if self._stream is not None:
            self._stream.synchronize()  # it may still write to a buffer that is dropped below
        chosen = set(self._order[:resident])
        self._streamed = [i for i in range(len(self._host)) if i not in chosen]
        self._buffers = []
        self._resident = {i: m for i, m in self._resident.items() if i in chosen}
        for layer in sorted(chosen - set(self._resident)):
            self._resident[layer] = self._host[layer].to(self._device)
        self._buffers = [self._new_buffer() for _ in range(self._buffers_needed())]

    def _in_place(self, resident: int) -> bool:
        # Count instead of remembering: a call that ran out of memory may have stopped anywhere.
        streamed = len(self._host) - resident
        held = (len(self._resident), len(self._streamed), len(self._buffers))
        return held == (resident, streamed, self._buffers_needed())

    def begin(self) -> None:
        """Start a pass through the layers with its first copies, unless they are under way."""
        first = self._streamed[: len(self._buffers)]
        if {b.holds for b in self._buffers} != set(first):
            for buffer, layer in zip(self._buffers, first, strict=True):
                self._copy(layer, buffer)

    @contextmanager
    def weights(self, layer: int) -> Iterator[dict[str, Tensor]]:
        """Yield the layer's tensors on the device, for use inside the ``with`` only."""
        if layer in self._resident:
            yield self._views(self._resident[layer])
            return
        buffer = next((b for b in self._buffers if b.holds == layer), self._buffers[0])
        if buffer.holds != layer:
            self._copy(layer, buffer)
        if buffer.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(buffer.copied)
        try:
            yield self._views(buffer.memory)
        finally:
            if buffer.used is not None:
                buffer.used.record(torch.cuda.current_stream(self._device))
        self._copy_next(layer, buffer)

    @torch.no_grad()
    def copy_once(self) -> None:
        """Copy one layer from host memory and drop it, to time a copy."""
        torch.empty_like(self._host[0], device=self._device).copy_(self._host[0], non_blocking=True)

    def _copy_next(self, layer: int, buffer: _Buffer) -> None:
        place = self._streamed.index(layer) + len(self._buffers)
        following = self._streamed[place % len(self._streamed)]
        if all(b.holds != following for b in self._buffers):
            self._copy(following, buffer)

    @torch.no_grad()
    def _copy(self, layer: int, buffer: _Buffer) -> None:
        buffer.holds = layer
        if self._stream is None:
            buffer.memory.copy_(self._host[layer], non_blocking=True)
            return
        assert buffer.used is not None
        assert buffer.copied is not None
        self._stream.wait_event(buffer.used)
        with torch.cuda.stream(self._stream):
            buffer.memory.copy_(self._host[layer], non_blocking=True)
            buffer.copied.record(self._stream)

    def _buffers_needed(self) -> int:
        return min(BUFFERS, len(self._streamed))

    def _new_buffer(self) -> _Buffer:
        buffer = _Buffer(torch.empty(self.layer_bytes, dtype=torch.uint8, device=self._device))
        if self._stream is not None:
            # The memory may have been another tensor's: the first copy waits for its last use.
            buffer.used, buffer.copied = torch.cuda.Event(), torch.cuda.Event()
            buffer.used.record(torch.cuda.current_stream(self._device))
        return buffer

    @torch.no_grad()
    def _packed(self, layer: nn.Module) -> Tensor:
        pinned = self._device.type == "cuda"
        memory = torch.empty(self.layer_bytes, dtype=torch.uint8, pin_memory=pinned)
        tensors = _tensors(layer)
        for name, view in self._views(memory).items():
            view.copy_(tensors[name])
        layer.to("meta")
        return memory

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        return {
            part.name: memory[part.start : part.stop].view(part.dtype).view(part.shape)
            for part in self._parts
        }


def _tensors(layer: nn.Module) -> dict[str, Tensor]:
    return dict(layer.named_parameters()) | dict(layer.named_buffers())


def _parts(layer: nn.Module) -> list[_Part]:
    parts: list[_Part] = []
    end = 0
    for name, tensor in _tensors(layer).items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.numel() * tensor.element_size()
        parts.append(_Part(name, tensor.shape, tensor.dtype, start, end))
    return parts


def spread(layers: int) -> list[int]:
    """Return an order of the layers whose every prefix is spread about evenly over the model.

    The order reverses bits, as in van der Corput's sequence. One resident layer more or less copies
    or drops only that layer.
    """
    bits = max(1, (layers - 1).bit_length())
    return sorted(range(layers), key=lambda layer: int(f"{layer:0{bits}b}"[::-1], 2))


SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose forward is: embed, layers, norm, head. Tests compare them with the original."""


class StreamedModel:
    """Runs a model with its layers in host memory and the rest on the device.

    It takes over a transformers model on CPU, which must not be used otherwise. Layers are copied
    while others compute. Raises ``ValueError`` for types not in ``SUPPORTED``.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        if model.config.model_type not in SUPPORTED:
            raise ValueError(
                f"judge: layers of {model.config.model_type} models cannot be streamed "
                f"(only {', '.join(SUPPORTED)}): set resident: all"
            )
        body: Any = model.eval().model
        self.device = device
        self.config: Any = model.config
        self.dtype = model.dtype
        self._layers = list(body.layers)
        self.layers = len(self._layers)
        self.store = LayerStore(self._layers, device)
        self._embed = body.embed_tokens.to(device)
        self._rotary = body.rotary_emb.to(device)
        self._norm = body.norm.to(device)
        head: Any = model.get_output_embeddings()
        self._head = head.to(device)
        self._types: list[str] | None = getattr(model.config, "layer_types", None)

    def keep(self, resident: int) -> None:
        self.store.keep(min(resident, self.layers))

    @property
    def fixed_bytes(self) -> int:
        """Device memory of embeddings, norm and head."""
        fixed = (self._embed, self._norm, self._head)
        weights = {id(p): p for module in fixed for p in module.parameters()}
        return sum(p.numel() * p.element_size() for p in weights.values())

    @torch.no_grad()
    def logits(
        self, ids: Tensor, at: Tensor, mask: Tensor | None = None, cache: DynamicCache | None = None
    ) -> Tensor:
        """Return the logits of the next token, shape (B, V).

        Args:
            ids: tokens, shape (B, T), after those in ``cache``.
            at: position in ``ids`` whose next token is wanted, shape (B,).
            mask: 1 for tokens and 0 for padding, of the cache and of these tokens, shape (B, S +
                T). None if all padding comes after the tokens, where causal attention never sees
                it.
            cache: keys and values of the S tokens before. Those of these tokens are added.
        """
        hidden = self.hidden(ids, mask, cache)
        last = hidden[torch.arange(len(ids), device=self.device), at]
        return self._head(self._norm(last))

    @torch.no_grad()
    def hidden(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        cache: DynamicCache | None = None,
        layers: int | None = None,
    ) -> Tensor:
        """Return the output of the first ``layers`` layers (default: all), before the norm, shape
        (B, T, H)."""
        hidden = self._embed(ids)
        masks = create_masks_for_generate(self.config, hidden, mask, cache)
        positions = _positions(ids, mask)
        shared = {
            "position_ids": positions,
            "position_embeddings": self._rotary(hidden, position_ids=positions),
            "past_key_values": cache,
            "use_cache": cache is not None,
        }
        self.store.begin()
        for layer in range(self.layers if layers is None else layers):
            hidden = self._run(layer, hidden, self._mask_of(layer, masks), shared)
        return hidden

    def _run(
        self, layer: int, hidden: Tensor, mask: Tensor | None, shared: Mapping[str, Any]
    ) -> Tensor:
        with self.store.weights(layer) as weights:
            return functional_call(
                self._layers[layer],
                weights,
                args=(hidden,),
                kwargs={"attention_mask": mask, **shared},
                strict=True,
            )

    def _mask_of(self, layer: int, masks: Any) -> Tensor | None:
        if not isinstance(masks, dict):
            return masks
        assert self._types is not None
        return masks[self._types[layer]]


class WholeModel:
    """A model of any architecture, all of it on the device, run by its own forward."""

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.device = device
        self.config: Any = model.config
        self.layers = self.config.get_text_config().num_hidden_layers
        whole: Any = model.eval()
        self._model: Any = whole.to(device)

    def keep(self, resident: int) -> None:
        """Do nothing: all layers are resident."""

    @torch.no_grad()
    def logits(
        self, ids: Tensor, at: Tensor, mask: Tensor | None = None, cache: DynamicCache | None = None
    ) -> Tensor:
        places, row_place = at.unique(return_inverse=True)
        logits = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=_positions(ids, mask),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=places,
        ).logits
        return logits[torch.arange(len(ids), device=self.device), row_place]


CausalModel = StreamedModel | WholeModel


def _positions(ids: Tensor, mask: Tensor | None) -> Tensor:
    # Shape (B, T), or (1, T) if nothing precedes. Padding does not count.
    if mask is None:
        return torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
