"""A job's problems, read, encoded and ordered, and the environments that they run in."""

from __future__ import annotations

import asyncio
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
from rollpacker.env.processes.pool import EnvironmentPool
from rollpacker.env.template import Template
from rollpacker.processes.children import keep_to_itself
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.episodes import Episodes
from rollpacker.train.model.loading import Card


@dataclass(frozen=True, slots=True)
class _Reading:
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
    """Return the problems to train on, and those to evaluate with. ``tools`` are the schemas of an
    environment's tools, for every prompt. Raises ``ValueError``."""
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
        f"{loaded.mapping}, {len(held_out)} of {len(loaded.rows)} rows held out (eval.fraction)"
    )
    training = _problems(reading, config.data, rows)
    return training, _problems(reading, config.data, held_out)


def load_held_out(
    config: RunConfig,
    card: Card,
    progress: Progress,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Problems:
    """The problems to evaluate with. The configuration must have some. Raises ``ValueError``."""
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
        # Without the environment's tools: an environment reports its own.
        told={row.id: told(row, tokenizer, data) for row in own if row.id in encoded.tokens},
    )
    return Problems(rows, encoded.tokens, source, lambda row: chat(row, data))


class Environments:
    """A run's environments, with their processes ready, if the configuration has some."""

    def __init__(self, config: RunConfig, card: Card, pool: EnvironmentPool | None) -> None:
        self._config = config
        self._card = card
        self._pool = pool

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return () if self._pool is None else self._pool.tools

    def episodes(self, cap: int, room: int, clock: Clock) -> Episodes | None:
        """The attempts' environments, which report to the event loop that runs now.

        Args:
            cap: most tokens that the model samples in all turns of a response.
            room: most tokens of a sequence that an engine holds.
            clock: the run's.
        """
        if self._pool is None or self._config.environment is None:
            return None
        episodes = Episodes(
            self._config.environment,
            self._pool,
            most=cap,
            total=longest_response(self._config.environment, cap),
            context=min(self._card.context, room),
            lockstep=self._config.deterministic,
            clock=clock,
        )
        episodes.start(asyncio.get_running_loop())
        return episodes

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def environments_of(config: RunConfig, card: Card, progress: Progress) -> Environments:
    """Start the environments' processes and wait until they are ready. Raises ``ValueError`` if the
    environment cannot be loaded, or the model has no chat template."""
    if config.environment is None:
        return Environments(config, card, None)
    if config.environment.kind == "agent":
        keep_to_itself()
    pool = EnvironmentPool(config.environment, card.tokenizer, config.model.chat_template_kwargs)
    try:
        pool.wait_ready()
    except BaseException:
        pool.close()
        raise
    for line in (*pool.said(), *check_call_ends(config, card)):
        progress.note(line)
    return Environments(config, card, pool)


def check_call_ends(config: RunConfig, card: Card) -> list[str]:
    """Lines for the user if a special token follows tool calls but ends no response, so that the
    model would invent its tools' answers."""
    if config.environment is None or config.environment.kind == "python":
        return []
    kwargs = config.model.chat_template_kwargs
    try:
        template = Template(card.tokenizer, kwargs, call_format=config.environment.call_format)
    except ValueError:
        return []
    end = template.call_end
    if end is None or end in config.rollout.stop or not card.stop_token_ids:
        return []
    if card.tokenizer.convert_tokens_to_ids(end) in card.stop_token_ids:
        return []
    known = [f"'{card.tokenizer.convert_ids_to_tokens(id_)}'" for id_ in card.stop_token_ids]
    return [
        f"model.path: its chat template has '{end}' after a tool call, but responses end only with "
        f"{' or '.join(known)}, so the model would invent the tool's answer: set rollout.stop: "
        f"['{end}']"
    ]
