"""Clients of OpenEnv's servers: an action is sent, an observation comes back."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from typing import Any

from rollpacker.env.adapters.rows import number, opened, seed_of, user
from rollpacker.env.base import EpisodeError, Message, Opening, Turn, call
from rollpacker.env.calls.values import shown, too_deep
from rollpacker.env.conversation import said
from rollpacker.errors import one_line

_NOT_SHOWN = {"done", "reward", "metadata"}


class OpenenvEnvironment:
    """A reply, less its reasoning, is the action: a JSON object of the action's fields, or, where
    the action has one field of text that it needs, plain text. One that fits neither is answered
    with what is wrong.

    Args:
        client: for this episode alone; plain or async.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._action_class = action_class(client)

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a row's seed; the observation comes behind its prompt."""
        result = await call(self._client.reset, seed=seed_of(row))
        opening = opened(row, observed(_part(result, "observation")))
        return Opening(
            messages=opening.messages, prompt=opening.prompt, done=bool(_part(result, "done"))
        )

    async def step(self, reply: Message) -> Turn:
        """Send a reply's action."""
        try:
            action = self._action(said(reply).rpartition("</think>")[2].strip())
        except ValueError as error:
            text = f"Error: this is no action: {one_line(error)}"
            return Turn(messages=user(text), calls=1, failed_calls=1)
        result = await call(self._client.step, action)
        done = bool(_part(result, "done"))
        return Turn(
            messages=() if done else user(observed(_part(result, "observation"))),
            reward=number(_part(result, "reward"), "the reward of step"),
            done=done,
        )

    def _action(self, text: str) -> Any:
        """Raises ``ValueError``, also pydantic's, where there is none in the text."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError):
            fields = None
        made = self._action_class
        if isinstance(fields, dict) and not too_deep(fields):
            return fields if made is None else made(**fields)
        name = None if made is None else _text_field(made)
        if made is None or name is None:
            names = "" if made is None else f" with {', '.join(_fields(made))}"
            raise ValueError(f"expected a JSON object{names}")
        return made(**{name: text})

    async def close(self) -> None:
        """Leave the server."""
        await call(self._client.close)


def action_class(client: Any) -> Any:
    """The class of a client's actions, by its type arguments; None where they are plain objects."""
    client = getattr(client, "async_client", client)
    for made in type(client).__mro__:
        for base in getattr(made, "__orig_bases__", ()):
            first = (*typing.get_args(base), None)[0]
            if hasattr(first, "model_fields"):
                return first
    return None


def _fields(made: Any) -> dict[str, Any]:
    return {name: field for name, field in made.model_fields.items() if name not in _NOT_SHOWN}


def _text_field(made: Any) -> str | None:
    """The only field that must be given, if it is text."""
    needed = {name: field for name, field in _fields(made).items() if field.is_required()}
    texts = [name for name, field in needed.items() if field.annotation is str]
    return texts[0] if len(texts) == len(needed) == 1 else None


def observed(observation: Any) -> str:
    """An observation as text: its only text, or all that it has as JSON."""
    if isinstance(observation, str):
        return observation
    dumped = observation.model_dump() if hasattr(observation, "model_dump") else observation
    if dumped is None:
        return ""
    if not isinstance(dumped, Mapping):
        return shown(dumped)
    kept = {name: value for name, value in dumped.items() if name not in _NOT_SHOWN}
    texts = [value for value in kept.values() if isinstance(value, str)]
    if len(texts) == 1 == len(kept):
        return texts[0]
    return shown(kept) if kept else ""


def _part(result: Any, name: str) -> Any:
    if not hasattr(result, name):
        raise EpisodeError(f"the client returned {type(result).__name__}, which has no {name}")
    return getattr(result, name)
