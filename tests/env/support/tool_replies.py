"""Replies of a model that calls tools."""

import json
from typing import Any

from rollpacker.env.base import Message
from rollpacker.env.calls.calls import parse
from rollpacker.env.messages import to_message


def call(name: str, **arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{body}</tool_call>"


def reply(text: str) -> Message:
    return to_message(parse(text, "hermes"), text)
