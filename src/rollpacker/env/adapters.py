"""Environments made for other trainers, whose names for things appear only here."""

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

# The methods of an environment show its kind.

Kind = Literal["ours", "trl", "openenv", "skyrl", "gym"]

_FREE = {"seed", "options"}  # arguments that ``reset`` of gem and Gymnasium takes
_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def kind_of(target: Any) -> Kind | None:
    """Return the kind of a class or an object, or None if it is no known environment."""
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
    # Whether ``reset`` takes no row.
    parameters = list(inspect.signature(target.reset).parameters.values())
    if inspect.isclass(target):
        parameters = parameters[1:]
    return all(each.name in _FREE or each.kind in _ANY for each in parameters)


# Rows of the data, as other trainers' environments are begun with them.

_SEEDS = 2**31


def prompt_of(row: Mapping[str, Any]) -> list[Message]:
    """Return the chat messages in a row's column ``prompt``. None without such a column."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and all(isinstance(each, Mapping) for each in prompt):
        return [dict(message) for message in prompt]
    return []


def seed_of(row: Mapping[str, Any]) -> int:
    """Return the row's own seed, or one made from the row. All responses to a row have the same
    task."""
    seed = row.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool):
        return seed % _SEEDS
    text = json.dumps(row, sort_keys=True, default=repr)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) % _SEEDS


def taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``given`` that a function takes by name."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        own = bound_name(function)
        return {name: value for name, value in given.items() if name != own}
    return {name: value for name, value in given.items() if name in parameters}


def opened(row: Mapping[str, Any], text: str) -> Opening:
    """Begin an episode with text after the row's prompt, in the same message."""
    prompt = prompt_of(row)
    if not text:
        return Opening()
    if not prompt:
        return Opening(messages=with_text((), text))
    return Opening(prompt=with_text(prompt, text))


def user(text: str) -> list[Message]:
    """Return an environment's text as the user's message."""
    return [{"role": "user", "content": whole(text)}]


def number(value: Any, what: str) -> float | None:
    """Return a reward, None included, as a float. Raises ``EpisodeError`` if it is no number."""
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise EpisodeError(f"{what} is {value!r:.80}, not a number") from None


# Environments of gem and others like Gymnasium's: text in, ``(observation, reward, ...)`` out.

_LENGTHS = (4, 5)
"""Lengths of the result of ``step``: with ``done``, or with ``terminated`` and ``truncated``."""


class GymEnvironment:
    """Observations are the user's messages. The first follows the row's prompt. All responses to a
    row begin with the same seed.

    ``alone`` is held while an episode begins, because a seed may be the whole process's.
    """

    def __init__(self, instance: Any, alone: asyncio.Lock) -> None:
        self._instance = instance
        self._alone = alone

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        reset = self._instance.reset
        async with self._alone:
            result = await call(reset, **taken(reset, {"seed": seed_of(row)}))
        return opened(row, observed(result[0] if isinstance(result, tuple) else result))

    async def step(self, reply: Message) -> Turn:
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
        await _close(self._instance)


async def _close(instance: Any) -> None:
    close = getattr(instance, "close", None)
    if close is not None:
        await call(close)


def observed(observation: Any) -> str:
    """Return an observation as text: as it is, or as JSON."""
    return "" if observation is None else shown(observation)


# Environments of skyrl-gym: ``init(prompt)``, ``step(action)``.


class SkyrlEnvironment:
    """An environment made from its row, which skyrl-gym calls ``extras``."""

    def __init__(self, make: Callable[..., Any], extras: bool) -> None:
        self._make = make
        self._extras = extras
        self._instance: Any = None

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Make the environment, which may replace the row's prompt."""
        self._instance = await call(self._make, **({"extras": dict(row)} if self._extras else {}))
        prompt = prompt_of(row)
        result = await call(self._instance.init, prompt_of(row))
        begun = list(result[0] if isinstance(result, tuple) else result)
        return Opening() if begun == prompt else Opening(prompt=begun)

    async def step(self, reply: Message) -> Turn:
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
        await _close(self._instance)


# Environments of TRL's ``environment_factory``: their public methods are tools.

_NOT_TOOLS = ("reset", "get_reward", "close")


def schemas(made: type, where: str) -> list[Schema]:
    """Return the schemas of a class's tools, in TRL's order. Raises ``ValueError``."""
    members = inspect.getmembers(made, predicate=inspect.isfunction)
    methods = [each for name, each in members if not (name.startswith("_") or name in _NOT_TOOLS)]
    return [tool.schema for tool in tools_of(methods, where).values()]


class TrlEnvironment:
    """``reset(**row)`` may return text, which follows the prompt. ``get_reward()``, if there is
    one, gives the episode's reward."""

    def __init__(
        self,
        instance: Any,
        tools: Sequence[Mapping[str, Any]],
        faults: ToolFaults | None = None,
    ) -> None:
        self._instance = instance
        self._faults = faults or ToolFaults()
        self._by = self._faults.caller({})
        names = [schema["function"]["name"] for schema in tools]
        pairs = zip(names, tools, strict=True)
        self._tools = {name: Tool(getattr(instance, name), dict(each)) for name, each in pairs}

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        self._by = self._faults.caller(row)
        reset = self._instance.reset
        said = await call(reset, **taken(reset, row))
        if said is not None and not isinstance(said, str):
            raise EpisodeError(f"reset returned {type(said).__name__}, not text or None")
        return opened(row, said or "")

    async def step(self, reply: Message) -> Turn:
        return await answer(self._tools, reply, self._by)

    async def final_reward(self) -> float | None:
        """Return ``get_reward()``, or None without one."""
        reward = getattr(self._instance, "get_reward", None)
        return None if reward is None else number(await call(reward), "what get_reward returned")

    async def close(self) -> None:
        await _close(self._instance)


# Clients of OpenEnv's servers: an action is sent, an observation comes back.

_NOT_SHOWN = {"done", "reward", "metadata"}


class OpenenvEnvironment:
    """The action is a reply without its reasoning: a JSON object of the action's fields, or plain
    text if it needs just one field, a text. For any other reply, the model gets the error.

    ``client``: for this episode alone. Plain or async.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._action_class = action_class(client)

    async def reset(self, row: Mapping[str, Any]) -> Opening:
        """Begin with a row's seed. The observation follows its prompt."""
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
    """Return the class of a client's actions from its type arguments, or None for plain objects."""
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
    needed = {name: field for name, field in _fields(made).items() if field.is_required()}
    texts = [name for name, field in needed.items() if field.annotation is str]
    return texts[0] if len(texts) == len(needed) == 1 else None


def _observation_text(observation: Any) -> str:
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
