"""The messages between the driver and the processes of environments.

Both directions are MessagePack: the user's code runs in such a process, so its messages are checked
and never unpickled. A row is sent pickled, since its columns may hold any type.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from rollpacker.env.base import Message
from rollpacker.env.calls.call import BadCall, Call, Parsed
from rollpacker.errors import one_line

# A model's reply as a chat message, and what environments read in it.

_KEY = re.compile("[A-Za-z0-9]{9}")
"""Ids in the form of Mistral's models, which their templates require."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A call that a reply made. ``key`` is its id, None if it has none."""

    call: Call | BadCall
    key: str | None = None


def to_message(parsed: Parsed, text: str, earlier: int = 0) -> Message:
    """Return the assistant's message, as in OpenAI's API.

    If it has calls, ``text`` is the whole reply. Calls that were not understood are in
    ``bad_calls``, with their places. ``earlier`` counts the calls of earlier replies, so that ids
    differ. An id from the model itself stays, because the tool's answer names it.
    """
    message: Message = {"role": "assistant", "content": parsed.content}
    if not parsed.calls:
        return message
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=2).hexdigest()
    good, bad = [], []
    for place, call in enumerate(parsed.calls):
        # Some templates require nine letters and digits.
        key = f"{digest}{(earlier + place) % 100_000:05}"
        if isinstance(call, BadCall):
            named = {"name": whole(call.name)} if call.name else {}
            bad.append({"place": place, "error": call.error, "id": key, **named})
            continue
        own = call.key if call.key and _KEY.fullmatch(call.key) else key
        good.append(_openai(call, key if any(own == each["id"] for each in good) else own))
    found = {"tool_calls": good, "bad_calls": bad, "text": text}
    return message | {key: value for key, value in found.items() if value}


def _openai(call: Call, key: str) -> dict[str, Any]:
    function = {"name": whole(call.name), "arguments": json.dumps(call.arguments)}
    return {"id": key, "type": "function", "function": function}


def count_calls(message: Message) -> int:
    """Return the number of calls in a reply, with those that were not understood."""
    return len(message.get("tool_calls") or ()) + len(message.get("bad_calls") or ())


def calls_of(message: Message) -> list[ToolRequest]:
    """Return the calls of a reply, in its order."""
    asked = [_asked(each) for each in message.get("tool_calls") or ()]
    for bad in message.get("bad_calls") or ():
        asked.insert(
            bad["place"], ToolRequest(BadCall(bad["error"], bad.get("name")), bad.get("id"))
        )
    return asked


def _asked(call: Mapping[str, Any]) -> ToolRequest:
    function = call["function"]
    return ToolRequest(Call(function["name"], arguments_of(function)), call.get("id"))


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a message's call, which are an object or JSON text of one."""
    arguments = function.get("arguments") or {}
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def said(message: Message) -> str:
    """Return the whole reply of the model, with its calls as it wrote them."""
    return str(message.get("text") or message.get("content") or "")


def whole(text: str) -> str:
    """Return text that can be written and tokenised: half a character becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def with_text(prompt: Sequence[Message], text: str) -> list[Message]:
    """Append text to the last message of a prompt if it is the user's, else as a new message."""
    if not prompt or prompt[-1].get("role") != "user":
        return [*prompt, {"role": "user", "content": text}]
    last = prompt[-1]
    return [*prompt[:-1], {**last, "content": f"{last.get('content') or ''}{text}"}]


_MOST = 1 << 31
_METRICS = 1000  # the most names of metrics in a turn


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Begin an episode. ``row``: from ``packed``. ``prompt``: its chat messages. ``room``: most
    tokens of a prompt in its place. ``template``: the row's own arguments of the chat template."""

    episode: int
    row: bytes
    prompt: Any
    tools: Any
    room: int
    template: dict[str, Any] = {}


def packed(row: Mapping[str, Any]) -> bytes:
    """Pickle a row for ``Begin``. Raises ``ValueError`` that names a column that cannot be sent."""
    try:
        return pickle.dumps(dict(row), pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # a value's own code may raise anything
        name = next((name for name, value in row.items() if not _sent(value)), "?")
        kind = type(row.get(name)).__name__
        raise ValueError(
            f"data: column '{name}' cannot be sent to the process of an environment: pickling its "
            f"{kind} failed: {one_line(error)}"
        ) from error


def _sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


class ModelReplied(msgspec.Struct, frozen=True, tag=True):
    """The model has replied with token ids, int32 in native order.

    ``left``: tokens that the conversation may still have. ``left_sampled``: that the model may
    sample. ``cut``: the reply is not complete, and the episode is over.
    """

    episode: int
    reply: bytes
    left: int
    left_sampled: int
    cut: bool = False


class Close(msgspec.Struct, frozen=True, tag=True):
    """Give an episode up. There is no answer."""

    episode: int


Command = Begin | ModelReplied | Close


class EnvironmentReady(msgspec.Struct, frozen=True, tag=True):
    """The process has loaded its environment or goes on with it. ``warnings`` are for the user."""

    warnings: list[str] = []
    tools: list[dict[str, Any]] = []


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The environment cannot be loaded or is broken: no process can go on with it."""

    error: str


class EnvironmentAnswer(msgspec.Struct, frozen=True, tag=True, kw_only=True, omit_defaults=True):
    """The answer of an environment.

    Args:
        tokens: after the reply (or, at the beginning, after the prompt), int32.
        prompt: at the beginning: token ids that replace the prompt's.
        over: ``stop`` or ``length`` if the episode is over, else empty.
        error: how the environment failed. The episode is over.
        seconds: that the environment took.
        messages: the whole conversation after the prompt, if the episode is over.
    """

    episode: int
    tokens: bytes = b""
    prompt: bytes = b""
    over: Literal["", "stop", "length"] = ""
    error: str = ""
    seconds: float = 0.0
    reward: float | None = None
    calls: int = 0
    failed_calls: int = 0
    metrics: dict[str, float] = {}
    messages: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        """Raises ``ValueError``, both when it is made and when it is read."""
        if len(self.tokens) % 4 or len(self.prompt) % 4:
            raise ValueError("token ids are 4 bytes each")
        if not (0 <= self.seconds < math.inf and math.isfinite(self.reward or 0.0)):
            raise ValueError("seconds and a reward are finite")
        if not (0 <= self.calls <= _MOST and 0 <= self.failed_calls <= _MOST):
            raise ValueError(f"calls of a turn are 0 to {_MOST}")
        if len(self.metrics) > _METRICS:
            raise ValueError(f"a turn has {len(self.metrics)} metrics, more than {_METRICS}")


Report = EnvironmentReady | Fatal | EnvironmentAnswer
