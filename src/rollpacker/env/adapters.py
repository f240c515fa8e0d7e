"""Environments made for other trainers.

Nothing outside knows those trainers' names for things.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

from rollpacker.env.base import EpisodeError, Message, Opening, ToolFaults, Turn, call
from rollpacker.env.calls import values
from rollpacker.env.calls.values import shown, too_deep
from rollpacker.env.messages import said, whole, with_text
from rollpacker.env.tools import Schema, Tool, answer, tools_of
from rollpacker.errors import one_line
from rollpacker.user_code import bound_name

# Environments are told apart by their methods.

Kind = Literal["ours", "trl", "openenv", "skyrl", "gym"]

_FREE = {"seed", "options"}
"""What ``reset`` of gem and Gymnasium can be given."""
_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def kind_of(target: Any) -> Kind | None:
    """The kind of a class or an object; None where it is no environment that is known."""
    if _has(target, "init", "step") and not _has(target, "reset"):
        return "skyrl"
    if _has(target, "reset", "step", "_step_payload"):
        return "openenv"
    if not _has(target, "reset"):
        return None
    if _has(target, "get_reward") or not _has(target, "step"):
        return "trl"
    return "gym" if _free(target) else "ours"


def _has(target: Any, *methods: str) -> bool:
    return all(callable(getattr(target, method, None)) for method in methods)


def _free(target: Any) -> bool:
    """Whether it is begun without a row."""
    parameters = list(inspect.signature(target.reset).parameters.values())
    if inspect.isclass(target):
        parameters = parameters[1:]
    return all(each.name in _FREE or each.kind in _ANY for each in parameters)


# Rows of the data, as other trainers' environments are begun with them.

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


# Environments of gem and others like Gymnasium's: text in, ``(observation, reward, ...)`` out.

_LENGTHS = (4, 5)
"""Of what ``step`` returns: with ``done``, or with ``terminated`` and ``truncated``."""


class GymEnvironment:
    """Observations are the user's messages; the first comes behind the row's prompt. A row's
    responses all begin with the same seed.

    Args:
        instance: for this episode alone.
        alone: held while one begins: a seed may be the whole process's.
    """

    def __init__(self, instance: Any, alone: asyncio.Lock) -> None:
        self._instance = instance
        self._alone = alone

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a row's seed."""
        reset = self._instance.reset
        async with self._alone:
            result = await call(reset, **taken(reset, {"seed": seed_of(row)}))
        return opened(row, observed(result[0] if isinstance(result, tuple) else result))

    async def step(self, reply: Message) -> Turn:
        """Act by a reply's whole text."""
        result = await call(self._instance.step, said(reply))
        if not isinstance(result, tuple) or len(result) not in _LENGTHS:
            raise EpisodeError(
                f"step returned {type(result).__name__}, not a tuple of observation, reward, "
                "terminated, truncated and info: as its reset takes no row, it was taken for an "
                "environment of gem or Gymnasium"
            )
        observation, reward, *ends, _ = result
        done = any(bool(end) for end in ends)
        return Turn(
            messages=() if done else user(observed(observation)),
            reward=number(reward, "the reward of step"),
            done=done,
        )

    async def close(self) -> None:
        """Close it, if it can be."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            await call(close)


def observed(observation: Any) -> str:
    """An observation as text: as it is, or as JSON."""
    return "" if observation is None else shown(observation)


# Environments of skyrl-gym: ``init(prompt)``, ``step(action)``.


class SkyrlEnvironment:
    """It is made of its row, which skyrl-gym calls ``extras``."""

    def __init__(self, make: Callable[..., Any], extras: bool) -> None:
        self._make = make
        self._extras = extras
        self._instance: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Make one, which may put a prompt of its own in the row's place."""
        self._instance = await call(self._make, **({"extras": dict(row)} if self._extras else {}))
        prompt = prompt_of(row)
        result = await call(self._instance.init, prompt_of(row))
        begun = list(result[0] if isinstance(result, tuple) else result)
        return Opening() if begun == prompt else Opening(prompt=begun)

    async def step(self, reply: Message) -> Turn:
        """Act by a reply's whole text."""
        output = await call(self._instance.step, said(reply))
        if not isinstance(output, Mapping) or "done" not in output:
            raise EpisodeError(f"step returned {output!r:.80}, without observations and done")
        done = bool(output["done"])
        return Turn(
            messages=() if done else list(output.get("observations") or ()),
            reward=number(output.get("reward"), "the reward of step"),
            done=done,
            metrics=await self._metrics() if done else {},
        )

    async def _metrics(self) -> dict[str, float]:
        metrics = getattr(self._instance, "get_metrics", None)
        found = {} if metrics is None else await call(metrics)
        numbers = {str(name): values.number(value) for name, value in found.items()}
        return {name: value for name, value in numbers.items() if value is not None}

    async def close(self) -> None:
        close = getattr(self._instance, "close", None)
        if close is not None:
            await call(close)


# Environments of TRL's ``environment_factory``: their public methods are tools.

_NOT_TOOLS = ("reset", "get_reward", "close")


def schemas(made: type, where: str) -> list[Schema]:
    """Schemas of the tools of a class, in TRL's order. Raises ``ValueError``."""
    members = inspect.getmembers(made, predicate=inspect.isfunction)
    methods = [each for name, each in members if not (name.startswith("_") or name in _NOT_TOOLS)]
    return [tool.schema for tool in tools_of(methods, where).values()]


class TrlEnvironment:
    """``reset(**row)`` may return text, which comes behind the prompt; ``get_reward()``, where
    there is one, gives the episode's reward.
    """

    def __init__(
        self,
        instance: Any,
        tools: Sequence[Mapping[str, Any]],
        faults: ToolFaults | None = None,
    ) -> None:
        self._instance = instance
        self._faults = faults or ToolFaults()
        self._by = self._faults.caller({})
        found = [Tool(getattr(instance, _name(schema)), dict(schema)) for schema in tools]
        self._tools = {tool.name: tool for tool in found}

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a row's columns."""
        self._by = self._faults.caller(row)
        reset = self._instance.reset
        said = await call(reset, **taken(reset, row))
        if said is not None and not isinstance(said, str):
            raise EpisodeError(f"reset returned {type(said).__name__}, not text or None")
        return opened(row, said or "")

    async def step(self, reply: Message) -> Turn:
        """Run the methods that a reply calls."""
        return await answer(self._tools, reply, self._by)

    async def final_reward(self) -> float | None:
        """What ``get_reward`` says; None without one."""
        reward = getattr(self._instance, "get_reward", None)
        return None if reward is None else number(await call(reward), "what get_reward returned")

    async def close(self) -> None:
        """Close it, if it can be."""
        close = getattr(self._instance, "close", None)
        if close is not None:
            await call(close)


def _name(schema: Mapping[str, Any]) -> str:
    return schema["function"]["name"]


# Clients of OpenEnv's servers: an action is sent, an observation comes back.

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
        opening = opened(row, _observation_text(_part(result, "observation")))
        return Opening(
            messages=opening.messages, prompt=opening.prompt, done=bool(_part(result, "done"))
        )

    async def step(self, reply: Message) -> Turn:
        try:
            action = self._action(said(reply).rpartition("</think>")[2].strip())
        except ValueError as error:
            text = f"Error: this is no action: {one_line(error)}"
            return Turn(messages=user(text), calls=1, failed_calls=1)
        result = await call(self._client.step, action)
        done = bool(_part(result, "done"))
        return Turn(
            messages=() if done else user(_observation_text(_part(result, "observation"))),
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


def _observation_text(observation: Any) -> str:
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
