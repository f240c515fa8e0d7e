"""Trains on finished groups, on a replica of one process."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rollpacker.checkpoint_names import CheckpointNames, Layout, stored
from rollpacker.config import ModelConfig, TrainConfig
from rollpacker.core.types import Group, Sample
from rollpacker.train import algorithms
from rollpacker.train.base import Partial, SampleId, Update
from rollpacker.train.losses import NO_EXTREMES, SUMS, batch_loss, measured, metrics
from rollpacker.train.mesh import Members, add_up, part, whole
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward, freeze_other_parts
from rollpacker.train.model.layouts import fit_of
from rollpacker.train.model.packing import Item, MicroBatch, MicroBatchShare, deal
from rollpacker.train.state import checkpoint
from rollpacker.train.state.optimizer import (
    Optimizer,
    Reference,
    check_schedule,
    learning_rate,
)
from rollpacker.train.state.warm_state import WarmState

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Trainer:
    """The pipeline of a replica: selects samples, computes losses and metrics, updates.

    Replicas hold the same weights by reducing over ``world``. Here a replica is one process, and
    only ``apply`` changes weights, in place. An engine in the same process may share their storage:
    build it first if it re-points parameters, and give it an ``engine_copy`` with LoRA. In a
    subclass with several members, all get the same calls, and each returns results of the whole
    replica.

    The ratio is exactly 1, except for samples with ``old_logprobs``, whose weights have changed
    since.

    Args:
        model: a causal language model of transformers, on its device, in the type to train in. A
            composed model (text and vision) trains only its text model and head.
        temperature: sampling temperature, by which logits are divided (0 counts as 1).
        max_length: longest response, Dr. GRPO's constant.
        total_updates: of the whole run, for decaying schedules.
        lora: the model's configuration, if ``lora_rank`` asks for adapters.
        world: the processes that hold this part of the weights, one of each replica.

    Raises ``ValueError`` when a decaying schedule or Dr. GRPO lacks its number, and as ``fit_of``.
    """

    _members = Members()

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: TrainConfig,
        *,
        temperature: float,
        max_length: int = 0,
        total_updates: int = 0,
        lora: ModelConfig | None = None,
        world: dist.ProcessGroup | None = None,
    ) -> None:
        check_schedule(config, total_updates)
        if config.algorithm.kind == "dr_grpo" and max_length <= 0:
            raise ValueError("train.algorithm.kind=dr_grpo needs rollout.max_completion_length")
        self.algorithm = algorithms.build(config.algorithm)
        self._model: Any = model
        self._tokenizer = tokenizer
        self._config = config
        self._temperature = temperature or 1.0
        self._max_length = max_length
        self._total_updates = total_updates
        self.world = world
        self._names = CheckpointNames(model)
        fit = fit_of(model)
        self._packing: packing.Packing = fit.packing(config.packing)
        freeze_other_parts(model)
        self._adapted = None
        if lora is not None and lora.lora_rank > 0:
            from rollpacker.train.model.lora import add_adapters

            self._adapted = add_adapters(model, lora)
        self._forward = PackedForward(model, fit.layout, recompute=config.gradient_checkpointing)
        self._costs = packing.costs_of(model)
        self._place()
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._optimizer = Optimizer(trained, config)
        self._first = None
        if config.beta > 0 and self._adapted is None:
            # ``data`` has no version counter, so an engine does not take the swap for new weights.
            self._first = Reference([part(p).data for _, p in trained])
        self._updates = 0
        self._skipped = 0
        self.warm = WarmState(self._resident, self.device)

    def _place(self) -> None: ...

    def _logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._forward.logprobs(batch, self._temperature)

    @property
    def device(self) -> torch.device:
        return self._optimizer.sums.device

    @property
    def leads(self) -> bool:
        return self._members.rank == 0

    @property
    def shares_weights(self) -> bool:
        """Whether ``weights`` yields the live tensors. Merged adapters and gathered weights are
        copies."""
        return self._adapted is None and self._members.group is None

    def accumulate(self, groups: Sequence[Group]) -> Partial:
        """Add the groups' un-normalised gradients to this replica's sum. Samples with advantage 0
        are not run unless there is a KL term, but count in the normaliser. A masked response
        counts, its tokens do not. Tokens that were not sampled never count."""
        samples = [sample for group in groups for sample in group.samples]
        tokens = sum(sample.sampled for sample in samples if not self._masked(sample))
        normaliser = self.algorithm.normaliser(tokens, len(samples), self._max_length)
        known = Partial(normaliser=normaliser, tokens=tokens, samples=len(samples), sums={})
        items = self._with_gradient(groups)
        return known + self._run(items) if items else known

    def _masked(self, sample: Sample) -> bool:
        return self._config.mask_truncated_completions and sample.finish_reason == "length"

    def score(self, groups: Sequence[Group]) -> dict[SampleId, NDArray[np.float32]]:
        """Logprobs of the responses that have a gradient, under the current weights. By prompt and
        sample index, shape (T,), nats, of the whole softmax. 0 for tokens that were not sampled."""
        items = self._with_gradient(groups)
        if not items:
            return {}
        lengths = [len(item.trained) for item in items]
        found = torch.zeros(sum(lengths), device=self._optimizer.sums.device)
        parts = dict(zip(map(id, items), found.split(lengths), strict=True))
        for share in self._shares(items):
            with torch.no_grad():
                logprobs = self._logprobs(share.batch)[0]
            if share.counts:
                each = logprobs.split(share.batch.lengths.tolist())
                for item, values in zip(share.items, each, strict=True):
                    parts[id(item)].copy_(values)
        scores = np.split(self._members.sum(found).cpu().numpy(), np.cumsum(lengths)[:-1])
        named = zip(items, scores, strict=True)
        return {(i.sample.prompt, i.sample.index): i.spread(values) for i, values in named}

    def _with_gradient(self, groups: Sequence[Group]) -> list[Item]:
        return packing.numbered(
            (sample, advantage)
            for group in groups
            for sample, advantage in zip(group.samples, group.advantages, strict=True)
            if (advantage != 0.0 or self._config.beta > 0)
            if sample.sampled and not self._masked(sample)
        )

    def _shares(self, items: list[Item]) -> list[MicroBatchShare]:
        config, device = self._config, self._optimizer.sums.device
        plans, shared = packing.plan(items, config.micro_batch_tokens, self._packing, self._costs)
        return [
            MicroBatchShare(plan, packing.build(plan, shared, device), counts)
            for plan, counts in deal(plans, self._members.rank, self._members.size)
        ]

    def _run(self, items: list[Item]) -> Partial:
        shares = self._shares(items)
        references: list[torch.Tensor] | list[None] = [None] * len(shares)
        if self._config.beta > 0:
            with torch.no_grad(), self._as_reference():
                references = [self._logprobs(share.batch)[0] for share in shares]
        sums = torch.zeros(len(SUMS), device=self._optimizer.sums.device)
        extremes = sums.new_tensor(NO_EXTREMES)
        for share, reference in zip(shares, references, strict=True):
            found, ends = self._backward(share.batch, reference, float(share.counts))
            if share.counts:
                sums += found
                extremes = torch.maximum(extremes, ends)
        run = sum(len(item.trained) for item in items)
        return measured(self._members.sum(sums), self._members.largest(extremes), run)

    def _backward(
        self, batch: MicroBatch, reference: torch.Tensor | None, weight: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = self._logprobs(batch)
        found = batch_loss(batch, logprobs, entropy, reference, self.algorithm, self._config)
        (found.loss * weight).backward()
        return found.sums, found.extremes

    def _as_reference(self) -> AbstractContextManager[None]:
        if self._adapted is not None:
            from rollpacker.train.model.lora import without_adapters

            return without_adapters(self._model)
        assert self._first is not None
        return self._first.active()

    def apply(self, total: Partial) -> Update:
        """Reduce the sums over all replicas, divide by ``total.normaliser``, update and clear the
        sums.

        Collective: every process of every replica calls it with the same ``total``. If every
        response is masked, the normaliser and the sums are 0. Raises ``RuntimeError`` in every
        member if one cannot reach the other replicas. Then only the sums have changed (NCCL ends
        the process).
        """
        self._reduce()
        sums = self._optimizer.sums
        sums.div_(total.normaliser or 1.0)
        norm = self._norm()
        rate = learning_rate(self._config, self._updates, self._total_updates)
        applied = math.isfinite(norm) and math.isfinite(total.sums.get("loss", 0.0))
        if applied:
            if 0 < self._config.max_grad_norm < norm:
                sums.mul_(self._config.max_grad_norm / norm)
            self._optimizer.step(rate)
            self._updates += 1
        self._skipped = 0 if applied else self._skipped + 1
        sums.zero_()
        return Update(
            applied=applied,
            grad_norm=norm,
            learning_rate=rate,
            metrics=metrics(total, self.algorithm, self._config),
            skipped=self._skipped,
        )

    def _reduce(self) -> None:
        if self.world is None:
            return
        failure = None
        try:
            add_up(self._optimizer.sums, self.world)
        except RuntimeError as error:
            failure = error
        other = RuntimeError("another process of the replica could not reduce over the replicas")
        self._members.agree(failure, other)

    def _norm(self) -> float:
        norm = torch.linalg.vector_norm(self._optimizer.sums)
        if self._members.size == 1:
            return float(norm)
        return math.sqrt(float(self._members.sum(norm.double().square())))

    def _resident(self) -> Iterator[torch.Tensor]:
        yield from (part(p.detach()) for p in self._model.parameters())
        yield from self._model.buffers()
        yield from self._optimizer.tensors()

    def discard(self) -> None:
        self._optimizer.sums.zero_()

    @property
    def layout(self) -> Layout:
        return self._names.layout

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights by the checkpoint's names, with persistent buffers, and with adapters merged.
        All members must iterate, as each whole tensor is gathered in turn."""
        if self._adapted is not None:
            from rollpacker.train.model.adapters import merged_weights

            weights = merged_weights(self._model)
        else:
            weights = stored(self._model)
        return self._names.converted((n, whole(w.to(self._names.own[n][0]))) for n, w in weights)

    def checksum(self) -> int:
        """CRC-32 of all weights. Replicas must agree."""
        total = 0
        for parameter in self._model.parameters():
            # A copy, as ``warm`` cannot move a storage that numpy has seen.
            own = part(parameter.detach()).contiguous()
            data = own.to("cpu", copy=True).view(-1).view(torch.uint8)
            total = zlib.crc32(data.numpy().data, total)
        if self._members.size == 1:
            return total
        return zlib.crc32(repr(self._members.each(total)).encode())

    def save(self, folder: Path) -> None:
        """Write the model in the hub's layout (with LoRA also ``adapter/``), and ``optimizer/``.
        All members of one replica call it, and the first one writes the model. Raises ``OSError``
        in the others if it cannot."""
        weights, failure = self.weights(), None
        # By the names of PEFT's model, as PEFT ignores other names when it loads them.
        named = () if self._adapted is None else self._adapted.named_parameters()
        adapters = {n: whole(p.detach()) for n, p in named if ".lora_" in n}
        if self._members.rank == 0:
            try:
                checkpoint.save_model(folder, self._model, self._tokenizer, self.layout, weights)
                if self._adapted is not None:
                    # By default peft asks the hub whether the embeddings were changed.
                    self._adapted.save_pretrained(
                        str(folder / "adapter"), state_dict=adapters, save_embedding_layers=False
                    )
            except Exception as error:
                failure = error
        for _ in weights:  # the others wait for this process until the last one is gathered
            pass
        other = OSError(f"{folder}: the first process of the replica could not write the model")
        self._members.agree(failure, other)
        checkpoint.save_state(folder / "optimizer", self._state(), self._members.group)

    def load(self, folder: Path) -> None:
        """Restore a ``save`` exactly. Raises ``ValueError`` on another architecture."""
        checkpoint.check_architecture(folder, self._model)
        state = self._state()
        checkpoint.load_state(folder / "optimizer", state)
        self._optimizer.copy_masters()
        self._updates, self._skipped = (int(v) for v in state["trainer"]["counts"])
        self.discard()

    def _state(self) -> checkpoint.State:
        counts = torch.tensor([self._updates, self._skipped])
        return {**self._optimizer.state(), "trainer": {"counts": counts}}
