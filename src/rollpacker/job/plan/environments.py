"""A run's environments: their processes, and what they need of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.config import RunConfig, longest_response
from rollpacker.env.processes.pool import EnvironmentPool
from rollpacker.env.template import Template
from rollpacker.processes.children import keep_to_itself
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.episodes import Episodes
from rollpacker.train.model.card import Card


class Environments:
    """Those of a run, if it has any.

    Args:
        config: the run's.
        card: of its model.
        pool: their processes, ready; None where a response is one turn.
    """

    def __init__(self, config: RunConfig, card: Card, pool: EnvironmentPool | None) -> None:
        self._config = config
        self._card = card
        self._pool = pool

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """JSON schemas of the tools that every prompt has."""
        return () if self._pool is None else self._pool.tools

    def episodes(self, cap: int, room: int, clock: Clock) -> Episodes | None:
        """The attempts' environments, heard in the loop that runs now.

        ``cap``: most tokens that the model samples in all turns of a response; ``room``: that an
        engine holds of a sequence.
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
        """End their processes."""
        if self._pool is not None:
            self._pool.close()


def environments_of(config: RunConfig, card: Card, progress: Progress) -> Environments:
    """Start their processes, and wait until they are ready.

    Raises ``ValueError`` where the environment cannot be loaded, or the model has no chat template.
    """
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
    """What to say where a token of its own stands behind calls, and ends no response: the model
    would make up what its tools answer. A template that cannot be used is named elsewhere."""
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
        f"model.path: its chat template has '{end}' behind a call of a tool, but responses end "
        f"only with {' or '.join(known)}: the model would go on by itself; set rollout.stop: "
        f"['{end}']"
    ]
