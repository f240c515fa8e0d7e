"""A job's problems: read, encoded and ordered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollpacker.config import DataConfig, RunConfig, longest_response
from rollpacker.core.types import Prompt
from rollpacker.data.base import Row
from rollpacker.data.encode import chat, encode_prompts, told
from rollpacker.data.held_out import asked, hold_out
from rollpacker.data.load import load_rows
from rollpacker.data.source import PromptSource
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.record.progress import Progress
from rollpacker.train.model.card import Card


@dataclass(frozen=True, slots=True)
class _Reading:
    """What all data of a run is read with."""

    config: RunConfig
    card: Card
    progress: Progress
    tools: Sequence[Mapping[str, Any]]


def load_data(
    config: RunConfig,
    card: Card,
    progress: Progress,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[Problems, Problems | None]:
    """The problems to train on, and those to evaluate by. Raises ``ValueError``.

    Args:
        config: of the run.
        card: of its model.
        progress: told how rows are read.
        tools: schemas of those that an environment gives every prompt.
    """
    reading = _Reading(config, card, progress, tools)
    loaded = load_rows(config.data)
    if config.eval is None or not config.eval.fraction:
        progress.note(loaded.mapping)
        problems = _problems(reading, config.data, loaded.rows)
        if config.eval is None or config.eval.data is None:
            return problems, None
        held_out = _load(reading, config.eval.data)
        trained = {asked(row.prompt) for row in problems.rows.values()}
        if both := sum(asked(row.prompt) in trained for row in held_out.rows.values()):
            progress.note(
                f"WARNING eval.data: {both} of its {len(held_out.rows)} prompts are trained on "
                "too: data.exclude leaves them out of the training"
            )
        return problems, held_out
    rows, held_out = hold_out(loaded.rows, config.eval.fraction, config.seed)
    progress.note(
        f"{loaded.mapping}; {len(held_out)} of {len(loaded.rows)} rows held out (eval.fraction)"
    )
    training = _problems(reading, config.data, rows)
    return training, _problems(reading, config.data, held_out)


def load_held_out(
    config: RunConfig,
    card: Card,
    progress: Progress,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Problems:
    """The problems to evaluate by, of a configuration that has some. Raises ``ValueError``."""
    assert config.eval is not None
    if config.eval.data is not None:
        return _load(_Reading(config, card, progress, tools), config.eval.data)
    held_out = load_data(config, card, progress, tools)[1]
    assert held_out is not None
    return held_out


def _load(reading: _Reading, data: DataConfig) -> Problems:
    loaded = load_rows(data)
    reading.progress.note(loaded.mapping)
    return _problems(reading, data, loaded.rows)


def _problems(reading: _Reading, data: DataConfig, rows: Sequence[Row]) -> Problems:
    """Rows encoded and ordered."""
    config, tokenizer, own = reading.config, reading.card.tokenizer, rows
    if reading.tools:
        rows = [replace(row, tools=[*row.tools, *reading.tools]) for row in rows]
    encoded = encode_prompts(
        rows,
        tokenizer,
        data,
        reading.card.context,
        longest_response(config.environment, config.rollout.max_completion_length or 0),
        config.model.chat_template_kwargs,
    )
    if encoded.skipped:
        reading.progress.note(
            f"{len(encoded.skipped)} prompts are too long and skipped (data.overlong)"
        )
    rows = [row for row in rows if row.id in encoded.tokens]
    source = PromptSource(
        [Prompt(id=r.id, domain=r.domain, tokens=len(encoded.tokens[r.id])) for r in rows],
        config.seed,
        data.shuffle,
        # Those of an environment are its own.
        told={row.id: told(row, tokenizer, data) for row in own if row.id in encoded.tokens},
    )
    return Problems(rows, encoded.tokens, source, lambda row: chat(row, data))
