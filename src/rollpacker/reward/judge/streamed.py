"""Layer-wise execution of a causal language model whose layers are mostly in host memory.

The model's own modules are called in a loop of ours, with the weights that a ``LayerStore``
brings (``torch.func.functional_call``), so that nothing of transformers is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from rollpacker.reward.judge.layers import LayerStore

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose forward is: embed, layers, norm, head; compared with the original in tests."""


class CausalModel(Protocol):
    """What scores and decodes the judge's prompts."""

    layers: int
    device: torch.device
    config: Any

    def keep(self, resident: int) -> None:
        """From now on so many layers stay on the device."""
        ...

    def logits(
        self, ids: Tensor, at: Tensor, mask: Tensor | None = None, cache: DynamicCache | None = None
    ) -> Tensor:
        """Logits of the next token.

        Args:
            ids: tokens, shape (B, T), after those in ``cache``.
            at: position in ``ids`` whose next token is asked for, shape (B,).
            mask: 1 for tokens and 0 for padding, of the cache's and these, shape (B, S + T);
                None when all padding comes after the tokens (causal attention never sees it).
            cache: keys and values of the S tokens before; these tokens' are added.

        Returns shape (B, V).
        """
        ...


class StreamedModel:
    """Takes a model over: its layers go to host memory, the rest to the device.

    Args:
        model: a transformers model of one of the ``SUPPORTED`` types, on CPU; not to be used
            otherwise from now on.
        device: where it runs.
        pipelined: copy layers while others compute.

    Raises ``ValueError`` for other model types.
    """

    def __init__(
        self, model: PreTrainedModel, device: torch.device, *, pipelined: bool = True
    ) -> None:
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
        self.store = LayerStore(self._layers, device, pipelined=pipelined)
        self._embed = body.embed_tokens.to(device)
        self._rotary = body.rotary_emb.to(device)
        self._norm = body.norm.to(device)
        head: Any = model.get_output_embeddings()
        self._head = head.to(device)
        self._types: list[str] | None = getattr(model.config, "layer_types", None)

    def keep(self, resident: int) -> None:
        """From now on ``resident`` layers (at most all) stay on the device."""
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
        """Logits of the next token, shape (B, V); see ``CausalModel``."""
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
        """Output of the first ``layers`` layers (of all), before the norm, shape (B, T, H)."""
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
        """Nothing: all layers are resident."""

    @torch.no_grad()
    def logits(
        self, ids: Tensor, at: Tensor, mask: Tensor | None = None, cache: DynamicCache | None = None
    ) -> Tensor:
        """Logits of the next token, shape (B, V); see ``CausalModel``."""
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


def _positions(ids: Tensor, mask: Tensor | None) -> Tensor:
    """Shape (B, T), or (1, T) when nothing precedes: padding does not count."""
    if mask is None:
        return torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
