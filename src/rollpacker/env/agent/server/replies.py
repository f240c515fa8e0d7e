"""A model's reply as OpenAI's chat API gives it, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rollpacker.env.agent.server.http import HttpResponse
from rollpacker.env.base import Message
from rollpacker.env.conversation import said

MODEL = "policy"
"""The name of the model that is trained; requests may use any other."""

_OURS = ("tool_calls", "bad_calls", "text")
"""Not for programs as they are."""
_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
"""Tokens are counted where they are sampled, not here."""


def shown(reply: Message, *, calling: bool) -> Message:
    """A reply as its program sees it.

    Where it has given no tools (``calling``), or no call was understood, calls are text, as the
    model wrote them.
    """
    more = {key: value for key, value in reply.items() if key not in _OURS}
    calls = reply.get("tool_calls") if calling else None
    return more | ({"tool_calls": calls} if calls else {"content": said(reply)})


def completion(reply: Message, body: Mapping[str, Any]) -> HttpResponse:
    """The response to a request's body: as a stream, in one piece, where it asks for one."""
    message = _message(reply)
    calls = message.get("tool_calls", ())
    finish = "tool_calls" if calls else "stop"
    if not body.get("stream"):
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        whole = _object("chat.completion", body) | {"choices": [choice], "usage": _USAGE}
        return HttpResponse(body=msgspec.json.encode(whole))
    if calls:
        numbers = enumerate(calls)
        message["tool_calls"] = [{"index": number} | call for number, call in numbers]
    chunks = [msgspec.json.encode(chunk) for chunk in _chunks(message, finish, body)]
    events = b"".join(b"data: " + chunk + b"\n\n" for chunk in (*chunks, b"[DONE]"))
    return HttpResponse(body=events, kind="text/event-stream")


def models(name: str = "") -> HttpResponse:
    """The one model, or a list of it."""
    model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "rollpacker"}
    return HttpResponse(
        body=msgspec.json.encode(model if name else {"object": "list", "data": [model]})
    )


def _chunks(message: Message, finish: str, body: Mapping[str, Any]) -> Iterator[Any]:
    common = _object("chat.completion.chunk", body)
    for delta, end in ((message, None), ({}, finish)):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": end}
        yield common | {"choices": [choice]}
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        yield common | {"choices": [], "usage": _USAGE}


def _object(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    model = body.get("model")
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model if isinstance(model, str) else MODEL,
    }


def _message(reply: Message) -> Message:
    message = {**reply, "role": "assistant", "refusal": None}
    if reply.get("tool_calls"):
        message["content"] = reply.get("content") or None
    return message
