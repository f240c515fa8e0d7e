"""A job's problems: read, encoded and ordered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollpacker.config import DataConfig, RunConfig, longest_response
from rollpacker.core.types import Prompt
from rollpacker.data.base import Row
from rollpacker.data.encode import chat, encode_prompts
from rollpacker.data.held_out import hold_out
from rollpacker.data.load import load_rows
from rollpacker.data.source import PromptSource
from rollpacker.runtime.problems import Problems
from rollpacker.runtime.progress import Progress
from rollpacker.train.card import Card


def load_data(
    config: RunConfig, card: Card, progress: Progress, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[Problems, Problems | None]:
    """The problems to train on, and those to evaluate by. Raises ``ValueError``.

    ``tools``: schemas of those that an environment gives every prompt.
    """
    loaded = load_rows(config.data)
    if config.eval is None or not config.eval.fraction:
        progress.note(loaded.mapping)
        problems = _problems(config, config.data, card, loaded.rows, progress, tools)
        if config.eval is None or config.eval.data is None:
            return problems, None
        return problems, load_problems(config, config.eval.data, card, progress, tools)
    rows, held_out = hold_out(loaded.rows, config.eval.fraction, config.seed)
    progress.note(
        f"{loaded.mapping}; {len(held_out)} of {len(loaded.rows)} rows held out (eval.fraction)"
    )
    return (
        _problems(config, config.data, card, rows, progress, tools),
        _problems(config, config.data, card, held_out, progress, tools),
    )


def load_held_out(
    config: RunConfig, card: Card, progress: Progress, tools: Sequence[Mapping[str, Any]] = ()
) -> Problems:
    """The problems to evaluate by, of a configuration that has some. Raises ``ValueError``."""
    assert config.eval is not None
    if config.eval.data is not None:
        return load_problems(config, config.eval.data, card, progress, tools)
    held_out = load_data(config, card, progress, tools)[1]
    assert held_out is not None
    return held_out


def load_problems(
    config: RunConfig,
    data: DataConfig,
    card: Card,
    progress: Progress,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Problems:
    """Read, encode and order a data set. Raises ``ValueError``."""
    loaded = load_rows(data)
    progress.note(loaded.mapping)
    return _problems(config, data, card, loaded.rows, progress, tools)


def _problems(
    config: RunConfig,
    data: DataConfig,
    card: Card,
    rows: Sequence[Row],
    progress: Progress,
    tools: Sequence[Mapping[str, Any]],
) -> Problems:
    if tools:
        rows = [replace(row, tools=[*row.tools, *tools]) for row in rows]
    encoded = encode_prompts(
        rows,
        card.tokenizer,
        data,
        card.context,
        longest_response(config.environment, config.rollout.max_completion_length or 0),
        config.model.chat_template_kwargs,
    )
    if encoded.skipped:
        progress.note(f"{len(encoded.skipped)} prompts are too long and skipped (data.overlong)")
    rows = [row for row in rows if row.id in encoded.tokens]
    prompts = [Prompt(id=r.id, domain=r.domain, tokens=len(encoded.tokens[r.id])) for r in rows]
    source = PromptSource(prompts, config.seed, data.shuffle)
    return Problems(rows, encoded.tokens, source, lambda row: chat(row, data))
