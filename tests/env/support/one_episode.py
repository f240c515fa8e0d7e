"""One episode of an environment that says what it is given, without a process of its own."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from chat_models import NAMES, make_tokenizer

from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import Message, ToolFaults, Turn
from rollpacker.env.episode import Episode
from rollpacker.env.messages import Begin, EnvironmentAnswer, ModelReplied, packed
from rollpacker.env.template import Template

MADE = {name: make_tokenizer(name) for name in NAMES}
TEMPLATES = {name: Template(MADE[name], {}) for name in NAMES}
USER = {"role": "user", "content": "How much is 2 + 3?"}


class Says:
    """An environment that says what it is given, and makes itself."""

    tools: Sequence[Mapping[str, Any]] = ()
    faults = ToolFaults()

    def __init__(self, opening: Any = (), turns: Sequence[Any] = ()) -> None:
        self._opening = opening
        self._turns = [*turns]
        self.heard: list[Message] = []

    def make(self) -> Any:
        return self

    async def open(self) -> None: ...

    async def reset(self, row: Mapping[str, Any]) -> Any:
        return self._opening

    async def step(self, reply: Message) -> Turn:
        self.heard.append(reply)
        return Turn(messages=self._turns.pop(0))

    async def close(self) -> None: ...


def talk(name: str, environment: Says, *replies: str) -> list[EnvironmentAnswer]:
    """What comes of an episode: its beginning, and an answer to each reply."""
    return talk_with(MADE[name], TEMPLATES[name], environment, *replies)


def talk_with(
    tokenizer: Any, template: Template, environment: Says, *replies: str
) -> list[EnvironmentAnswer]:
    """The same with any model."""

    async def episode() -> list[EnvironmentAnswer]:
        begin = Begin(episode=1, row=packed({}), prompt=[USER], tools=[], room=10_000)
        config = EnvironmentConfig(kind="python", path=["x"])
        one = Episode(config, environment, template, begin)
        answers = [await one.begin()]
        for reply in replies:
            ids = np.asarray(tokenizer(reply, add_special_tokens=False)["input_ids"], np.int32)
            step = ModelReplied(episode=1, reply=ids.tobytes(), left=10_000, left_sampled=10_000)
            answers.append(await one.step(step))
        return answers

    return asyncio.run(episode())
