"""TRL's GRPO trainer with rollpacker's rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trl  # pyright: ignore[reportMissingImports]
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from rollpacker.config import MiniEngineConfig
from rollpacker.config.rollout import EngineConfig, TailBatchingConfig, TailMode
from rollpacker.trl.rewards import Logged
from rollpacker.trl.rounds import Rounds
from rollpacker.trl.settings import (
    check_arguments,
    check_own,
    check_release,
    check_supported,
    tail_config,
)

check_release(trl.GRPOTrainer, trl.__version__)


class GRPOTrainer(trl.GRPOTrainer):
    """``trl.GRPOTrainer`` whose responses come from rounds with tail batching.

    Loss, optimizer, logging, checkpoints and callbacks stay TRL's. One of our engines decodes from
    the current weights. Reward functions get finished responses while others decode.
    ``output_dir/rollpacker`` is a run's folder, for ``rollpacker report`` and ``rollpacker journal
    replay``.

    Args:
        args, kwargs: of ``trl.GRPOTrainer``.
        tail_batching: ``exact`` (discards nothing), ``race`` (the paper's), ``prompts``, ``auto``
            or ``off``, or all options as a ``TailBatchingConfig`` or a dict.
        engine: the built-in one, over the trainer's own weights, or vLLM in this process, which
            gets them each round.
        reward_threads: threads for reward functions that are not coroutines. More than one needs
            functions that are thread-safe. With 0 TRL calls all functions in the main thread after
            the round.

    Raises ``ValueError`` in one line for arguments that are not supported.
    """

    def __init__(
        self,
        *args: Any,
        tail_batching: TailMode | TailBatchingConfig | Mapping[str, Any] = "exact",
        engine: EngineConfig | None = None,
        reward_threads: int = 1,
        **kwargs: Any,
    ) -> None:
        check_own(engine, reward_threads)
        tail = tail_config(tail_batching)
        check_arguments(trl.GRPOTrainer, args, kwargs)
        super().__init__(*args, **kwargs)
        engine = engine or MiniEngineConfig()
        check_supported(self, tail, engine)
        self.rollpacker = Rounds(self, tail, engine, reward_threads)
        self.rollout_func = _responses
        self.add_callback(_Told(self.rollpacker))

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. Checkpoints hold the state of tail batching too."""
        path = resume_from_checkpoint
        if path is True:
            path = get_last_checkpoint(str(self.args.output_dir))
        self.rollpacker.resume(path or None)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.rollpacker.close()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        self.rollpacker.trained()
        return loss

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """Use the responses that a round kept, and their rewards."""
        if not self.model.training:
            return super()._generate_and_score_completions(inputs)
        inputs = self.rollpacker.sample(inputs)
        own = self.reward_funcs
        graded = self.rollpacker.graded()
        if graded:
            bias = self.rollpacker.bias()
            self.reward_funcs = [_told(number, graded, bias) for number in range(len(own))]
        try:
            return super()._generate_and_score_completions(inputs)
        finally:
            self.reward_funcs = own


def _responses(prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, Any]:
    """A round's responses in place of TRL's own generation (its ``rollout_func``)."""
    rounds = trainer.rollpacker
    if trainer.model.training:
        ids = rounds.prompt_ids
        completions = [output.tokens.tolist() for output in rounds.responses]
    else:
        ids, completions = rounds.evaluate(prompts)
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def _told(
    number: int, graded: Sequence[Logged], bias: Mapping[str, float]
) -> Callable[..., list[float | None]]:
    """A reward function that returns and logs known results. The first one also logs the bias."""

    def reward(*, log_extra: Any, log_metric: Any, **_columns: Any) -> list[float | None]:
        if number == 0:
            _log(graded, log_extra, log_metric)
            for name, value in bias.items():
                log_metric(name, value)
        return [each.scores[number] for each in graded]

    return reward


def _log(graded: Sequence[Logged], log_extra: Any, log_metric: Any) -> None:
    for column in dict.fromkeys(name for each in graded for name in each.extra):
        log_extra(column, [each.extra.get(column) for each in graded])
    for name in dict.fromkeys(name for each in graded for name in each.metrics):
        values = [each.metrics[name] for each in graded if name in each.metrics]
        log_metric(name, sum(values) / len(values))


class _Told(TrainerCallback):
    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._learning_rate = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the coming update's learning rate, as afterwards it is the next one's."""
        del args, state, control
        schedule = kwargs.get("lr_scheduler")
        self._learning_rate = 0.0 if schedule is None else schedule.get_last_lr()[0]

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        del args, state, control
        self._rounds.updated(self._learning_rate)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        self._rounds.logged(kwargs.get("logs") or {})

    def on_save(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        del control
        self._rounds.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")
