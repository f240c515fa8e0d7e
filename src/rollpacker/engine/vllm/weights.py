"""New weights into a built vLLM engine."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from rollpacker.checkpoint_names import possible_names

_HEAD = "lm_head.weight"  # a checkpoint may hold it even if it is tied to the embeddings


def names_of(path: str, vllm_config: Any) -> tuple[frozenset[str], ...]:
    """The possible sets of a checkpoint's tensor names, from its configuration."""
    # vLLM changes the class of a transformers model that it runs, and needs its config set.
    with set_current_vllm_config(vllm_config), torch.device("meta"):
        like = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    return possible_names(like)


class Checked:
    """A checkpoint's tensors, one by one, up to the first with an unknown name. It ends early
    instead of raising, as an error within vLLM's reload would leave the model half on the meta
    device for good. ``verify`` raises afterwards."""

    def __init__(
        self, weights: Iterable[tuple[str, torch.Tensor]], wanted: Sequence[frozenset[str]]
    ) -> None:
        self._weights = weights
        self._wanted = wanted
        self._seen: set[str] = set()
        self._problem: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in self._weights:
                if name != _HEAD:
                    self._wanted = [names for names in self._wanted if name in names]
                if not self._wanted:
                    raise ValueError(f"weights hold {name!r}, which the model lacks")
                self._seen.add(name)
                yield name, tensor
        except Exception as error:
            self._problem = error

    def verify(self) -> None:
        """Raise the error that ended the iteration, or ``ValueError`` when names are missing."""
        if self._problem is not None:
            raise self._problem
        missing = min((names - self._seen for names in self._wanted), key=len)
        if missing:
            first, count = sorted(missing)[0], len(missing)
            raise ValueError(f"weights lack {first!r} ({count} missing in all)")


def reload(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Load weights in vLLM's worker. Returns the parameters that kept old values.

    It replaces ``reload_weights``, which only warns of those. On a CPU, it packs weights for the
    kernels again. Experts need a new kernel, as vLLM would keep the old packing, and a reload skips
    a tied head.
    """
    model, config = worker.get_model(), worker.vllm_config
    on_cpu = next(model.parameters()).device.type == "cpu"
    if on_cpu:
        for module in model.modules():
            if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                module.quant_method.moe_kernel = None
    own = {name for name, _ in model.named_parameters()}
    # Only the checkpoint's own: vLLM derives further parameters from it (MLA's W_UV).
    names = own & {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in get_layerwise_info(module).restore_metadata[0]
    }
    with set_current_vllm_config(config):
        initialize_layerwise_reload(model)
        try:
            taken = model.load_weights(iter(weights))
        finally:
            kept = _kept(model)
            finalize_layerwise_reload(model, config.model_config)
    head = getattr(model, "lm_head", None)
    if head is not None and on_cpu:
        head.quant_method.process_weights_after_loading(head)
    if not on_cpu:
        torch.cuda.empty_cache()  # otherwise a layer's copies stay allocated beside gpu_memory
    return sorted(kept | (names - taken if taken is not None else set()))


def _kept(model: torch.nn.Module) -> set[str]:
    fresh: set[int] = set()
    waiting: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        info = get_layerwise_info(module)
        old = info.kernel_tensors[0] if info.kernel_tensors else _own(module)
        if info.can_load() and info.load_numel <= 0:
            if not (is_deferred_attention_layer(module) or _only_padding(module)):
                waiting |= {f"{path}.{name}": parameter for name, parameter in old.items()}
        else:
            fresh |= {id(parameter) for parameter in old.values()}
    return {name for name, parameter in waiting.items() if id(parameter) not in fresh}


def _only_padding(module: torch.nn.Module) -> bool:
    """Whether a member's part of the embeddings begins behind the vocabulary's end."""
    part = getattr(module, "shard_indices", None)
    return part is not None and part.num_org_elements + part.num_added_elements == 0


def _own(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters(recurse=False))
