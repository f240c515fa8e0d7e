"""The engine of a replay: a checkpoint under the built-in one, or scripted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Literal

from rollpacker.config import FakeEngineConfig, MiniEngineConfig, ModelConfig
from rollpacker.engine.base import Engine
from rollpacker.trace_replay.plan import StepPlan

EngineKind = Literal["mini", "fake"]
_FAKE_VOCABULARY = 16


def build_engine(
    kind: EngineKind,
    model: str | None,
    plans: Sequence[StepPlan],
    *,
    concurrency: int,
    dtype: Literal["float32", "bfloat16"] = "float32",
    scale: float = 1.0,
) -> tuple[Engine, int]:
    """Return an idle engine that can hold every turn of ``plans``, and its number of token ids.

    Args:
        kind: ``mini`` (on a GPU if there is one) or ``fake``, which takes no time.
        model: checkpoint of ``mini``.
        concurrency: most sequences decoded together.
        scale: of the plans' lengths. An error names a scale that would fit.

    Raises ``ValueError`` if there is no such checkpoint or its context is too short.
    """
    if kind == "fake":
        from rollpacker.engine.fake import FakeEngine

        return FakeEngine(FakeEngineConfig(), concurrency=concurrency), _FAKE_VOCABULARY
    if model is None:
        raise ValueError("--model: the engine 'mini' needs a checkpoint, 'fake' needs none")
    return _mini(ModelConfig(path=model, dtype=dtype), plans, concurrency, scale)


def _mini(
    config: ModelConfig, plans: Sequence[StepPlan], concurrency: int, scale: float
) -> tuple[Engine, int]:
    import torch
    from transformers.utils import logging

    from rollpacker.engine.mini import MiniEngine
    from rollpacker.train.model.loading import load_model, read_card

    _check_context(plans, read_card(config).context, config.path, scale)
    logging.disable_progress_bar()
    loaded, tokenizer = load_model(config, "cuda" if torch.cuda.is_available() else "cpu")
    most = min(concurrency, max(len(plan.responses) for plan in plans))
    engine = MiniEngine(loaded, config=MiniEngineConfig(max_running=most), tokenizer=tokenizer)
    return engine, int(loaded.config.vocab_size)


def _check_context(plans: Sequence[StepPlan], context: int, path: str, scale: float) -> None:
    worst = max(plans, key=lambda plan: plan.longest)
    if worst.longest <= context:
        return
    # A prompt and a response may each be rounded up by half a token.
    fits = floor(1e4 * scale * (context - 1) / worst.longest) / 1e4
    raise ValueError(
        f"the longest turn, in step {worst.step}, takes {worst.longest} tokens, and {path} has a "
        f"context of {context}: use --max-tokens-scale {fits:g} or a model with a longer context"
    )
