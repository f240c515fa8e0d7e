"""A call in each format, and what comes of a reply that makes it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from rollpacker.config.rewards import CallFormat
from rollpacker.env.calls.call import Call, Parsed
from rollpacker.env.calls.calls import parse
from rollpacker.env.messages import to_message
from rollpacker.env.tools import ToolsEnvironment, tools_of

QUOTE = '<|"|>'
DEEPSEEK = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>"
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>%s<｜tool▁call▁end｜>"
V3 = DEEPSEEK_CALL % 'function<｜tool▁sep｜>add\n```json\n{"a": 2, "b": 3}\n```'
V31 = DEEPSEEK_CALL % 'add<｜tool▁sep｜>{"a": 2, "b": 3}'
XML = "<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>"
PAIRS = ("<arg_key>a</arg_key>", "<arg_value>2</arg_value>", "<arg_key>b</arg_key>")
GLM = "<tool_call>add\n{}\n{}\n{}\n<arg_value>3</arg_value>\n</tool_call>".format(*PAIRS)
GEMMA = "<start_function_call>call:add{a:2,b:3}<end_function_call>"
HEADER = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"

ONE: dict[CallFormat, str] = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 2, "b": 3}}',
    "qwen3_coder": f"<tool_call>\n{XML}\n</tool_call>",
    "glm": GLM,
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]',
    "mistral_v11": '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}',
    "functiongemma": GEMMA,
    "gemma4": "<|tool_call>call:add{a:2,b:3}<tool_call|>",
    "deepseek_v3": DEEPSEEK % V3,
    "deepseek_v31": DEEPSEEK % V31,
    "harmony": f'{HEADER}{{"a": 2, "b": 3}}',
    "pythonic": "[add(a=2, b=3)]",
}
"""A call, as a model of the format writes it."""


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_gemma(value: Any, quote: str) -> str:
    """A value in Gemma's notation."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(in_gemma(each, quote) for each in value)}]"
    if isinstance(value, dict):
        items = (f"{name}:{in_gemma(each, quote)}" for name, each in value.items())
        return f"{{{','.join(items)}}}"
    return as_json(value)


def written(call: Call, form: CallFormat) -> str:
    """Any call, as a model of the format writes it."""
    arguments = as_json(call.arguments)
    texts = {n: v if isinstance(v, str) else as_json(v) for n, v in call.arguments.items()}
    both = as_json({"name": call.name, "arguments": call.arguments})
    pairs = ", ".join(f"{name}={as_json(value)}" for name, value in call.arguments.items())
    tags = "".join(f"<parameter={n}>\n{text}\n</parameter>\n" for n, text in texts.items())
    keys = "".join(
        f"<arg_key>{n}</arg_key>\n<arg_value>{text}</arg_value>\n" for n, text in texts.items()
    )
    fenced = f"function<｜tool▁sep｜>{call.name}\n```json\n{arguments}\n```"
    return {
        "hermes": f"<tool_call>\n{both}\n</tool_call>",
        "llama3": both.replace('"arguments"', '"parameters"', 1),
        "qwen3_coder": f"<tool_call>\n<function={call.name}>\n{tags}</function>\n</tool_call>",
        "glm": f"<tool_call>{call.name}\n{keys}</tool_call>",
        "mistral": f"[TOOL_CALLS] [{both}]",
        "mistral_v11": f"[TOOL_CALLS]{call.name}[ARGS]{arguments}",
        "functiongemma": (
            f"<start_function_call>call:{call.name}{in_gemma(call.arguments, '<escape>')}"
            "<end_function_call>"
        ),
        "gemma4": (f"<|tool_call>call:{call.name}{in_gemma(call.arguments, QUOTE)}<tool_call|>"),
        "deepseek_v3": DEEPSEEK.replace("%s", DEEPSEEK_CALL.replace("%s", fenced)),
        "deepseek_v31": DEEPSEEK.replace(
            "%s", DEEPSEEK_CALL.replace("%s", f"{call.name}<｜tool▁sep｜>{arguments}")
        ),
        "harmony": HEADER.replace("add", call.name) + arguments,
        "pythonic": f"[{call.name}({pairs})]",
    }[form]


INTEGER = {"type": "integer"}
ADD = Call("add", {"a": 2, "b": 3})
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}},
    },
}


def read(text: str, form: CallFormat) -> Parsed:
    """A reply, with the schema of ``add``."""
    return parse(text, form, tools=[SCHEMA])


def add(a: int, b: int) -> str:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return str(a + b)


def answers(text: str, form: CallFormat) -> list[dict[str, Any]]:
    """What tools say to a reply."""
    tools = tools_of([add], "")
    schemas = [tool.schema for tool in tools.values()]
    message = to_message(parse(text, form, tools=schemas), text)
    turn = asyncio.run(ToolsEnvironment(tools).step(message))
    return list(turn.messages)
