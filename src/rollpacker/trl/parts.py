"""The parts of a TRL trainer that a run uses: model, prompts, reward functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import torch

from rollpacker.checkpoint_names import CheckpointNames
from rollpacker.train.model.adapters import (
    bare_copy,
    bare_weights,
    has_adapters,
    merged_weights,
)
from rollpacker.trl.prompts import Examples, Given, LazilyEncoded, ShardedPrompts, TrainerProblems
from rollpacker.trl.rewards import TrainerReward
from rollpacker.trl.settings import reward_names

_T = TypeVar("_T")


class LoopThread:
    """An event loop in its own thread, for a thread that may run a loop itself, as in a
    notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollpacker")
        self._thread.daemon = True
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _T]) -> _T:
        async def work() -> _T:
            return function()

        return self.run(work())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_PARSED = ("response_schema", "response_template")
"""Attributes of tokenizers whose completions TRL parses to messages."""


def model_of(trainer: Any) -> Any:
    """The trained model without its wrappers. Adapters are layers in it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoded_model(trainer: Any) -> Any:
    """The model that the built-in engine reads: the trained one, or with adapters a copy for
    ``weights_of``, which shares the unchanged weights."""
    model = model_of(trainer)
    return bare_copy(model) if has_adapters(model) else model


def weights_of(trainer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The current weights by the checkpoint's names, adapters merged into copies."""
    model = model_of(trainer)
    return CheckpointNames(model, bare_weights(model)).converted(merged_weights(model))


def problems_of(trainer: Any, races: bool) -> TrainerProblems:
    """The trainer's prompts. Racing rounds draw their own, others use those of its sampler."""
    accelerator, dataset, args = trainer.accelerator, trainer.train_dataset, trainer.args
    source: Given | ShardedPrompts
    if races:
        source = ShardedPrompts(
            len(dataset),
            args.seed,
            bool(args.shuffle_dataset),
            accelerator.process_index,
            accelerator.num_processes,
        )
    else:
        size = len(dataset) if hasattr(dataset, "__len__") else 0
        source = Given(size // accelerator.num_processes)
    rows = Examples(dataset)
    return TrainerProblems(
        rows, LazilyEncoded(rows, lambda prompts: encode(trainer, prompts)), source
    )


def early_functions(trainer: Any) -> list[TrainerReward]:
    """Reward functions to call while others decode. None if TRL must call them all. TRL must if one
    is a model, or if it parses completions to messages."""
    calls, weights = trainer.reward_funcs, trainer.reward_weights.tolist()
    if any(isinstance(call, torch.nn.Module) for call in calls):
        return []
    if any(getattr(trainer.processing_class, name, None) is not None for name in _PARSED):
        return []
    return list(map(TrainerReward, reward_names(trainer), calls, weights))


def encode(trainer: Any, prompts: Sequence[Any]) -> Sequence[Sequence[int]]:
    """Token ids of prompts, as TRL makes them."""
    return trainer._tokenize_prompts(list(prompts))[0]


def decode(trainer: Any, ids: Any, prompts: Sequence[Any]) -> list[Any]:
    """Completions as TRL gives them to reward functions."""
    texts = trainer.processing_class.batch_decode(ids, skip_special_tokens=True)
    chat = isinstance(prompts[0], list)
    return [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
