"""The trainer that holds a whole replica of the model in one process."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rollpacker.config import ModelConfig, TrainConfig
from rollpacker.core.types import Group, Sample
from rollpacker.train import algorithms, checkpoint, packing
from rollpacker.train.algorithms import Responses
from rollpacker.train.base import TRAINED, NotFiniteError, Partial, SampleId, Update
from rollpacker.train.forward import hidden_states
from rollpacker.train.loss import k3, token_logprobs
from rollpacker.train.optimizer import Optimizer
from rollpacker.train.packing import Item, MicroBatch
from rollpacker.train.reference import SwappedReference
from rollpacker.train.schedule import learning_rate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_SUMS = ("loss", "clip_low", "clip_high", "kl", *TRAINED)
_RUN = "tokens_run"
"""Response tokens that were run: those of samples without a gradient are left out."""


class LocalTrainer:
    """One replica; several hold the same weights by reducing over ``world``.

    The ratio is exactly 1, but for samples that bring ``old_logprobs``: those of weights that have
    changed since.
    Weights change in place, in ``apply`` only, so an engine in the same process may share their
    storage (build it first if it re-points parameters; with LoRA give it an ``engine_copy``).

    Args:
        model: Qwen2, Qwen3 or Llama, on its device, in the type to train in.
        tokenizer: saved beside the model.
        config: the update.
        temperature: sampling temperature; logits are divided by it (0 counts as 1).
        max_length: longest response, Dr. GRPO's constant.
        total_updates: updates of the whole run, for decaying schedules.
        lora: the model's configuration, when ``lora_rank`` asks for adapters.
        world: process group of all replicas; None when there is one.

    Raises ``ValueError`` when a decaying schedule or Dr. GRPO lacks its number.
    """

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
        _check(config, max_length, total_updates)
        self.algorithm = algorithms.build(config.algorithm)
        self._model: Any = model
        self._tokenizer = tokenizer
        self._config = config
        self._temperature = temperature or 1.0
        self._max_length = max_length
        self._total_updates = total_updates
        self.world = world
        self._adapted = None
        if lora is not None and lora.lora_rank > 0:
            from rollpacker.train.lora import add_adapters

            self._adapted = add_adapters(model, lora)
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._optimizer = Optimizer(trained, config)
        self._reference = None
        if config.beta > 0 and self._adapted is None:
            self._reference = SwappedReference([p for _, p in trained])
        self._costs = _costs(model)
        self._updates = 0
        self._skipped = 0

    @property
    def shares_weights(self) -> bool:
        """Whether ``weights`` yields the live tensors (false with LoRA: merged copies)."""
        return self._adapted is None

    def accumulate(self, groups: Sequence[Group]) -> Partial:
        """Add the groups' un-normalised gradients to this replica's sum.

        Samples with advantage 0 are not run unless there is a KL term, but count in the
        normaliser; of masked ones only the response counts, not its tokens.
        """
        samples = [sample for group in groups for sample in group.samples]
        tokens = sum(len(sample.tokens) for sample in samples if not self._masked(sample))
        normaliser = self.algorithm.normaliser(tokens, len(samples), self._max_length)
        run = self._with_gradient(groups)
        sums = self._run(run) if run else {}
        return Partial(normaliser=normaliser, tokens=tokens, samples=len(samples), sums=sums)

    def _masked(self, sample: Sample) -> bool:
        return self._config.mask_truncated_completions and sample.finish_reason == "length"

    def score(self, groups: Sequence[Group]) -> dict[SampleId, NDArray[np.float32]]:
        """Log-probabilities of the responses that have a gradient, under the weights in place.

        By prompt and sample index, shape (T,), nats, of the whole softmax.
        """
        result: dict[SampleId, NDArray[np.float32]] = {}
        for plan, batch in self._batches(self._with_gradient(groups)):
            with torch.no_grad():
                logprobs = self._logprobs(batch)[0].cpu().numpy()
            parts = np.split(logprobs, np.cumsum(batch.lengths.tolist())[:-1])
            for item, part in zip(plan, parts, strict=True):
                result[item.sample.prompt, item.sample.index] = part.copy()
        return result

    def _with_gradient(self, groups: Sequence[Group]) -> list[Item]:
        return [
            Item(sample, float(advantage), number)
            for number, group in enumerate(groups)
            for sample, advantage in zip(group.samples, group.advantages, strict=True)
            if (advantage != 0.0 or self._config.beta > 0) and not self._masked(sample)
        ]

    def _batches(self, items: list[Item]) -> list[tuple[list[Item], MicroBatch]]:
        config, device = self._config, self._optimizer.sums.device
        if not items:
            return []
        plans, shared = packing.plan(items, config.micro_batch_tokens, config.packing, self._costs)
        return [(plan, packing.build(plan, shared, device)) for plan in plans]

    def _run(self, items: list[Item]) -> dict[str, float]:
        batches = [batch for _, batch in self._batches(items)]
        references: list[torch.Tensor] | list[None] = [None] * len(batches)
        if self._config.beta > 0:
            with torch.no_grad(), self._as_reference():
                references = [self._logprobs(b)[0] for b in batches]
        sums = torch.zeros(len(_SUMS), device=self._optimizer.sums.device)
        for batch, reference in zip(batches, references, strict=True):
            sums += self._backward(batch, reference)
        result = dict(zip(_SUMS, sums.tolist(), strict=True))
        return result | {_RUN: float(sum(len(i.sample.tokens) for i in items))}

    def _backward(self, batch: MicroBatch, reference: torch.Tensor | None) -> torch.Tensor:
        """Add one micro-batch's gradients; the sums of its metrics, in the order of ``_SUMS``."""
        logprobs, entropy = self._logprobs(batch)
        now = logprobs.detach()
        old = now if batch.old_logprobs is None else batch.old_logprobs
        responses = Responses(
            logprobs=logprobs,
            old=old,
            advantages=batch.advantages,
            lengths=batch.lengths,
            owner=batch.owner,
        )
        losses, clipped = self.algorithm.surrogate(responses)
        kl = now.new_zeros(())
        if reference is not None:
            divergence = k3(logprobs, reference)
            if self._config.kl_bias_correction:
                divergence = divergence * self.algorithm.ratio(responses)
            losses = losses + self._config.beta * divergence
            kl = divergence.detach().sum()
        loss = torch.dot(losses, self.algorithm.weights(batch.lengths)[batch.owner])
        loss.backward()
        if self.algorithm.sequence_level:
            clipped = clipped / batch.lengths[batch.owner]
        up = batch.advantages[batch.owner] > 0
        ratio = torch.exp(now - old).sum()
        difference = (now - batch.sampler_logprobs).abs().sum()
        bounds = clipped[~up].sum(), clipped[up].sum()
        return torch.stack((loss.detach(), *bounds, kl, entropy.sum(), ratio, difference))

    def _logprobs(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_states(self._model, batch, recompute=self._config.gradient_checkpointing)
        weight = self._model.lm_head.weight
        return token_logprobs(hidden, weight, batch.targets, self._temperature)

    def _as_reference(self) -> AbstractContextManager[None]:
        if self._adapted is not None:
            return self._adapted.disable_adapter()
        assert self._reference is not None
        return self._reference.active()

    def apply(self, total: Partial) -> Update:
        """Reduce the sums over all replicas, divide by ``total.normaliser`` and update.

        Collective: every replica calls it with the same ``total``. Clears the sums.

        The normaliser is 0 where every response is masked: then so are the sums. Raises
        ``NotFiniteError`` after ``max_skipped_updates`` updates in a row that were skipped because
        the loss or the gradient was not finite.
        """
        sums = self._optimizer.sums
        if self.world is not None:
            dist.all_reduce(sums, group=self.world)
        sums.div_(total.normaliser or 1.0)
        norm = float(torch.linalg.vector_norm(sums))
        rate = learning_rate(self._config, self._updates, self._total_updates)
        applied = math.isfinite(norm) and math.isfinite(total.sums.get("loss", 0.0))
        if applied:
            if 0 < self._config.max_grad_norm < norm:
                sums.mul_(self._config.max_grad_norm / norm)
            self._optimizer.step(rate)
            self._updates += 1
        self._skipped = 0 if applied else self._skipped + 1
        sums.zero_()
        if self._skipped >= self._config.max_skipped_updates:
            raise NotFiniteError(
                f"{self._skipped} updates in a row had a loss or gradient that is not finite; "
                "lower train.learning_rate or start from an earlier checkpoint"
            )
        metrics = self._metrics(total)
        return Update(applied=applied, grad_norm=norm, learning_rate=rate, metrics=metrics)

    def _metrics(self, total: Partial) -> dict[str, float]:
        """Means over all tokens of the loss, or responses; ``trained_tokens/*`` over those run."""
        sums, count = total.sums, total.samples if self.algorithm.sequence_level else total.tokens
        low, high = (sums.get(f"clip_{side}", 0.0) / max(count, 1) for side in ("low", "high"))
        metrics = {
            "loss": sums.get("loss", 0.0) / (total.normaliser or 1.0),
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high,
            "clip_ratio/region_mean": low + high,
        }
        if self._config.beta > 0:
            metrics["kl"] = sums.get("kl", 0.0) / max(total.tokens, 1)
        if sums.get(_RUN):
            metrics |= {f"trained_tokens/{name}": sums[name] / sums[_RUN] for name in TRAINED}
        return metrics

    def discard(self) -> None:
        """Throw the accumulated gradients away (a step that is repeated)."""
        self._optimizer.sums.zero_()

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The weights by the checkpoint's names, adapters merged."""
        if self._adapted is not None:
            from rollpacker.train.lora import merged_weights

            return merged_weights(self._model)
        return ((name, p.detach()) for name, p in self._model.named_parameters())

    def checksum(self) -> int:
        """CRC-32 of all weights; replicas must agree."""
        total = 0
        for parameter in self._model.parameters():
            data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8)
            total = zlib.crc32(data.numpy().data, total)
        return total

    def save(self, folder: Path) -> None:
        """Write the model in the hub's layout (with LoRA also ``adapter/``), and ``optimizer/``."""
        checkpoint.save_model(folder, self._model, self._tokenizer, self.weights())
        if self._adapted is not None:
            # Left to itself, peft asks the hub whether the embeddings were changed.
            self._adapted.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
        checkpoint.save_state(folder / "optimizer", self._state())

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, exactly; with LoRA over the same base model.

        Raises ``ValueError`` on another architecture.
        """
        checkpoint.check_architecture(folder, self._model)
        state = self._state()
        checkpoint.load_state(folder / "optimizer", state)
        self._optimizer.copy_masters()
        self._updates, self._skipped = (int(v) for v in state["trainer"]["counts"])
        self.discard()

    def _state(self) -> checkpoint.State:
        counts = torch.tensor([self._updates, self._skipped])
        return {**self._optimizer.state(), "trainer": {"counts": counts}}


def _check(config: TrainConfig, max_length: int, total_updates: int) -> None:
    if config.lr_scheduler_type != "constant" and total_updates <= 0:
        raise ValueError(
            f"train.lr_scheduler_type={config.lr_scheduler_type} needs the number of updates; "
            "set steps, or use constant"
        )
    if config.algorithm.kind == "dr_grpo" and max_length <= 0:
        raise ValueError("train.algorithm.kind=dr_grpo needs rollout.max_completion_length")


def _costs(model: Any) -> packing.Costs:
    """Multiply-adds of a forward pass, outside the embeddings.

    A pair counts twice: attention reached half the rate of the matrix products on a CPU (71 and
    147 ps per multiply-add of a whole rectangle, at lengths of 40 to 600).
    """
    config = model.config
    linear = sum(p.numel() for p in model.model.layers.parameters())
    heads = config.num_attention_heads * model.model.layers[0].self_attn.head_dim
    return packing.Costs(linear=linear, attention=2 * 2 * heads * config.num_hidden_layers)
