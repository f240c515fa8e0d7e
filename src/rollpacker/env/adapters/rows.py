"""What other trainers' environments are begun with, from a row of the data."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rollpacker.env.base import EpisodeError, Message, Opening
from rollpacker.env.conversation import whole, with_text
from rollpacker.user_code import bound_name

_SEEDS = 2**31


def prompt_of(row: Mapping[str, Any]) -> list[Message]:
    """The chat messages of a row's column ``prompt``; none where it has no such column."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt):
        return [dict(message) for message in prompt]
    return []


def seed_of(row: Mapping[str, Any]) -> int:
    """A seed: the row's own, or made of it, so that all responses to a row have the same task."""
    seed = row.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed % _SEEDS
    text = json.dumps(row, sort_keys=True, default=repr)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) % _SEEDS


def taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Of what there is, what a function takes by name."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        own = bound_name(function)
        return {name: value for name, value in given.items() if name != own}
    return {name: value for name, value in given.items() if name in parameters}


def opened(row: Mapping[str, Any], text: str) -> Opening:
    """An episode that begins with text behind the row's prompt, in the same message."""
    prompt = prompt_of(row)
    if not text:
        return Opening()
    if not prompt:
        return Opening(messages=with_text((), text))
    return Opening(prompt=with_text(prompt, text))


def user(text: str) -> list[Message]:
    """What an environment says, as the user's message."""
    return [{"role": "user", "content": whole(text)}]


def number(value: Any, what: str) -> float | None:
    """A reward that may be None, or a number of any library. Raises ``EpisodeError``."""
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise EpisodeError(f"{what} is {value!r:.80}, not a number") from None
