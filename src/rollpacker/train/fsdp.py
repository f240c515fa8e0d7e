"""The trainer that spreads a replica over several processes with FSDP2."""

from __future__ import annotations

from types import MethodType
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

from rollpacker.config import ModelConfig, TrainConfig
from rollpacker.train.mesh import Members, part
from rollpacker.train.model.forward import Rope, response_logprobs, run_layer
from rollpacker.train.model.packing import MicroBatch
from rollpacker.train.state.optimizer import Optimizer
from rollpacker.train.state.reference import CopiedReference
from rollpacker.train.trainer import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class FSDPTrainer(Trainer):
    """A replica over the processes of ``members``, each with its part of every weight.

    Every member gets the same calls in the same order, and returns what covers the whole replica.
    Only ``discard`` and ``load`` are not collective. While gradients are summed nothing is
    exchanged with other replicas: ``apply`` reduces over ``world``, which may be replaced.

    The trained weights are kept in float32; a model of another type computes in its own. Their
    storage is not the model's as it came, so no engine can share it.

    Args:
        members: its timeout is after how long an operation that others do not join fails. On
            CUDA devices it has both backends (``cpu:gloo,cuda:nccl``), since checkpoints are
            agreed on by the hosts.

    The others are those of ``Trainer``; the model is whole when it comes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainConfig,
        *,
        members: dist.ProcessGroup,
        temperature: float,
        max_length: int = 0,
        total_updates: int = 0,
        lora: ModelConfig | None = None,
        world: dist.ProcessGroup | None = None,
    ) -> None:
        self._members = Members(members, model.device)
        self._mesh = DeviceMesh.from_group(members, model.device.type, mesh_dim_names=("shard",))
        super().__init__(
            model,
            tokenizer,
            config,
            temperature=temperature,
            max_length=max_length,
            total_updates=total_updates,
            lora=lora,
            world=world,
        )

    def _place(self) -> Optimizer:
        # Frozen weights (LoRA) stay in the model's type, and so does what is computed.
        policy = MixedPrecisionPolicy(
            param_dtype=self._model.lm_head.weight.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        for layer in self._model.model.layers:
            self._shard(layer, run_layer, policy, reshard=True)
        self._shard(self._model, response_logprobs, policy, reshard=False)
        trained = [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]
        return Optimizer(trained, self._config)

    def _shard(
        self, module: Any, forward: Any, policy: MixedPrecisionPolicy, *, reshard: bool
    ) -> None:
        """Spread what of ``module`` is not yet; ``module.packed`` is then ``forward`` over it."""
        for parameter in module.parameters():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()
        fully_shard(module, mesh=self._mesh, mp_policy=policy, reshard_after_forward=reshard)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        module.packed = MethodType(forward, module)
        register_fsdp_forward_method(module, "packed")

    def _reference(self) -> CopiedReference:
        return CopiedReference([part(p) for p in self._model.parameters() if p.requires_grad])

    def _logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        recompute = self._config.gradient_checkpointing
        found = self._model.packed(batch, self._temperature, recompute, _run_packed)
        if not torch.is_grad_enabled():
            # A backward pass would do it; what stays gathered is not seen to change.
            self._model.reshard()
        return found

    @property
    def shares_weights(self) -> bool:
        """Never: weights are gathered for whoever reads them."""
        return False


def _run_packed(
    layer: Any, x: torch.Tensor, rope: Rope, batch: MicroBatch, recompute: bool
) -> torch.Tensor:
    return layer.packed(x, rope, batch, recompute)
