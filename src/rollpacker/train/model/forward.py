"""The forward pass of transformers' causal language models over flat micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rollpacker.train.model import attention
from rollpacker.train.model.packing import MicroBatch
from rollpacker.train.model.token_logprobs import Head, token_logprobs

BatchLayout = Literal["flat", "wrapped", "rows"]
"""How a model gets a micro-batch. ``flat``: one sequence of all tokens, in which only attention
sees rows. ``wrapped``: modules with a convolution over neighbours see rows too. ``rows``: rows
padded on the right, for models with their own attention."""


class PackedForward:
    """Runs micro-batches through a model, which is unchanged between calls.

    Args:
        model: of transformers, run in evaluation mode.
        layout: from ``layouts.fit_of``.
        recompute: keep only each layer's input for the backward pass.

    Raises ``ValueError`` if there is nothing to ``recompute``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: BatchLayout = "flat",
        *,
        recompute: bool = False,
    ) -> None:
        self._model: Any = model
        self._layout = layout
        self._decoder = decoder_of(model)
        configs: dict[int, Any] = {}
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation"):
                configs.setdefault(id(config), config)
        self._configs = list(configs.values())
        self._recomputed: list[Any] = []
        self._dropouts: list[tuple[Any, str, float]] = []
        self._training: list[Any] = []
        if recompute:
            self._recomputed = [
                m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
            ]
            if not self._recomputed:
                kind: Any = model.config.model_type
                raise ValueError(
                    f"train.gradient_checkpointing: transformers cannot recompute the layers of "
                    f"{kind} models: set it to false"
                )
            self._without_dropout()
        self._hooks = [
            hook
            for mixer in (mixers_of(model) if layout == "wrapped" else ())
            for hook in attention.by_rows(mixer)
        ]

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer, name, value in self._dropouts:
            setattr(layer, name, value)
        for module in self._training:
            module.training = True

    def logprobs(self, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.hidden_states(batch)
        return token_logprobs(hidden, Head.of(self._model), batch.targets, temperature)

    def hidden_states(self, batch: MicroBatch) -> torch.Tensor:
        """Hidden states from which the sampled tokens are predicted, shape (T, H)."""
        if self._model.training:  # another user of the model may have set it
            self._training = [m for m in self._model.modules() if m.training]
            self._model.eval()
        with self._recomputing(batch):
            if self._layout == "rows":
                rows = batch.causal
                inside = torch.zeros_like(rows.gather).view(-1)
                inside[rows.scatter] = 1
                out = self._decoder(
                    input_ids=batch.tokens[rows.gather],
                    attention_mask=inside.view_as(rows.gather),
                    use_cache=False,
                )
                hidden = out.last_hidden_state.flatten(0, 1)[rows.scatter]
            else:
                with attention.running(self._configs, batch):
                    # Without a mask, models search for starts of sequences themselves.
                    out = self._decoder(
                        input_ids=batch.tokens[None],
                        attention_mask=torch.ones_like(batch.tokens)[None],
                        position_ids=batch.positions[None],
                        use_cache=False,
                    )
                hidden = out.last_hidden_state[0]
        return hidden[batch.sources]

    def _without_dropout(self) -> None:
        """Disable the layers' own dropout, as they recompute themselves only in training mode. That
        mode is not set on modules below them."""
        for layer in self._recomputed:
            for name, value in vars(layer).items():
                if "dropout" in name and isinstance(value, float):
                    self._dropouts.append((layer, name, value))
        for layer, name, _ in self._dropouts:
            setattr(layer, name, 0.0)

    @contextmanager
    def _recomputing(self, batch: MicroBatch) -> Iterator[None]:
        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            own = self._layout != "rows"
            return nullcontext(), attention.running(self._configs, batch) if own else nullcontext()

        def run(function: Any, *args: Any) -> Any:
            return checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )

        ours: dict[str, Any] = {
            "training": True,
            "gradient_checkpointing": True,
            "_gradient_checkpointing_func": run,
        }
        kept = [{n: getattr(layer, n, None) for n in ours} for layer in self._recomputed]
        try:
            for layer in self._recomputed:
                layer.__dict__.update(ours)
            yield
        finally:
            for layer, own in zip(self._recomputed, kept, strict=True):
                layer.__dict__.update(own)


def decoder_of(model: Any) -> Any:
    """A model's child with the input embeddings, below the head."""
    embeddings = model.get_input_embeddings()
    return next(
        child for child in model.children() if any(m is embeddings for m in child.modules())
    )


def text_model_of(model: Any) -> Any:
    """The text model of a composed model: the innermost one that holds the input embeddings."""
    embeddings = model.get_input_embeddings()
    holding = [m for m in model.modules() if any(each is embeddings for each in m.modules())]
    return [m for m in holding if isinstance(m, PreTrainedModel)][-1]


def is_composed(model: Any) -> bool:
    """Whether a model has parts, such as for vision, that text tokens never pass."""
    return model.config.get_text_config() is not model.config


def freeze_other_parts(model: Any) -> None:
    """Freeze all of a composed model except its text model and head."""
    if is_composed(model):
        trained = (text_model_of(model), model.get_output_embeddings())
        kept = {id(p) for part in trained for p in part.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in kept:
                parameter.requires_grad_(False)


def mixers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that mix neighbouring tokens: those with a convolution over the sequence."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, torch.nn.Conv1d) for child in module.children())
    ]
