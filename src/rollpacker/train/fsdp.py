"""The trainer that spreads a replica over several processes with FSDP2."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from rollpacker.train.mesh import Members
from rollpacker.train.model.packing import MicroBatch
from rollpacker.train.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FSDPTrainer(Trainer):
    """A replica over the processes of ``members``, each with its part of every weight.

    Every member gets the same calls in the same order, and returns results of the whole replica.
    Only ``discard`` and ``load`` are not collective. Replicas exchange nothing until ``apply``
    reduces over ``world``, which may be replaced.

    Trained weights are kept in float32. A model of another type computes in its own, except for
    modules that are all float32, such as the router of DeepSeek-V2. Adapters are rounded to the
    model's type, unlike in a replica of one process. In tiny bfloat16 models logprobs differ by
    0.02 to 0.03 nats on average after three updates of 1e-2. No engine can share the weights'
    storage.

    The timeout of ``members`` limits each operation. On CUDA devices the group has both backends
    (``cpu:gloo,cuda:nccl``), as hosts agree on checkpoints. The model arrives whole.
    """

    def __init__(
        self, model: PreTrainedModel, *args: Any, members: dist.ProcessGroup, **kwargs: Any
    ) -> None:
        self._members = Members(members, model.device)
        self._mesh = DeviceMesh.from_group(members, model.device.type, mesh_dim_names=("shard",))
        super().__init__(model, *args, **kwargs)

    def _place(self) -> None:
        model = self._model
        # Frozen weights (LoRA) and the computation stay in the model's type.
        policy = MixedPrecisionPolicy(
            param_dtype=model.get_output_embeddings().weight.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        blocks = set(model._no_split_modules or ())
        layers = [m for m in model.modules() if type(m).__name__ in blocks]
        if not layers:
            raise ValueError(
                f"trainer.kind=fsdp: transformers names no layers to shard for "
                f"{model.config.model_type} models, so all weights would be gathered at once: set "
                "it to local"
            )
        exact = replace(policy, param_dtype=torch.float32)
        for module in _exact(model, policy.param_dtype):
            self._shard(module, exact, reshard=True)
        for layer in layers:
            self._shard(layer, policy, reshard=True)
        self._shard(model, policy, reshard=False)
        model.packed = self._forward.logprobs
        register_fsdp_forward_method(model, "packed")

    def _shard(self, module: Any, policy: MixedPrecisionPolicy, *, reshard: bool) -> None:
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshard)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def _logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._model.packed(batch, self._temperature)
        if not torch.is_grad_enabled():
            # Without a backward pass nothing reshards, and gathered weights would become stale.
            self._model.reshard()
        return found


def _exact(model: torch.nn.Module, usual: torch.dtype | None) -> list[torch.nn.Module]:
    """Modules of float32 weights in a model of another type. Adapters are left out, as merging
    copies them, which FSDP's modules do not allow."""
    if usual == torch.float32:
        return []
    found: dict[str, torch.nn.Module] = {}
    for name, module in model.named_modules():
        weights = dict(module.named_parameters(name))
        if not weights or name.startswith(tuple(f"{each}." for each in found)):
            continue
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            continue
        if all(w.dtype == torch.float32 and ".lora_" not in n for n, w in weights.items()):
            found[name] = module
    return list(found.values())
