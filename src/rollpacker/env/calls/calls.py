"""Parses tool calls in a model's text. Never runs them, and never raises."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import get_args

from rollpacker.config.rewards import CallFormat
from rollpacker.env.calls import json_calls, literal_calls, tagged_calls
from rollpacker.env.calls.call import Parsed
from rollpacker.env.calls.tagged_calls import Tools

FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)

_END = "</think>"
_REASONING = {"<think>": _END, "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>"}
"""How reasoning begins and ends: in most models, in Mistral's, and in Gemma 4."""
_ENDS = re.compile("|".join(map(re.escape, _REASONING.values())))

_READS: Mapping[CallFormat, Callable[[str, int], Parsed]] = {
    "hermes": json_calls.hermes,
    "llama3": json_calls.llama3,
    "mistral": json_calls.mistral,
    "mistral_v11": json_calls.mistral_v11,
    "functiongemma": literal_calls.functiongemma,
    "gemma4": literal_calls.gemma4,
    "deepseek_v3": json_calls.deepseek_v3,
    "deepseek_v31": json_calls.deepseek_v31,
    "harmony": json_calls.harmony,
    "pythonic": literal_calls.pythonic,
}
_READS_TEXT: Mapping[CallFormat, Callable[[str, int, Tools], Parsed]] = {
    "qwen3_coder": tagged_calls.qwen3_coder,
    "glm": tagged_calls.glm,
}  # formats whose arguments are plain text
_JSON = '{"%(key)s": "%(value)s"}'
_XML = "<function=%(name)s>\n<parameter=%(key)s>\n%(value)s\n</parameter>\n</function>"
_PAIR = "<arg_key>%(key)s</arg_key>\n<arg_value>%(value)s</arg_value>"
_GEMMA = "call:%(name)s{%(key)s:<escape>%(value)s<escape>}"
_BLOCK = f"function<｜tool▁sep｜>%(name)s\n```json\n{_JSON}\n```"
_DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
_WRITTEN: Mapping[CallFormat, str] = {
    "hermes": f'<tool_call>\n{{"name": "%(name)s", "arguments": {_JSON}}}\n</tool_call>',
    "llama3": f'{{"name": "%(name)s", "parameters": {_JSON}}}',
    "qwen3_coder": f"<tool_call>\n{_XML}\n</tool_call>",
    "glm": f"<tool_call>%(name)s\n{_PAIR}\n</tool_call>",
    "mistral": f'[TOOL_CALLS] [{{"name": "%(name)s", "arguments": {_JSON}}}]',
    "mistral_v11": f"[TOOL_CALLS]%(name)s[ARGS]{_JSON}",
    "functiongemma": f"<start_function_call>{_GEMMA}<end_function_call>",
    "gemma4": '<|tool_call>call:%(name)s{%(key)s:<|"|>%(value)s<|"|>}<tool_call|>',
    "deepseek_v3": f"{_DEEPSEEK}{_BLOCK}{_DEEPSEEK_END}",
    "deepseek_v31": f"{_DEEPSEEK}%(name)s<｜tool▁sep｜>{_JSON}{_DEEPSEEK_END}",
    "harmony": f"<|channel|>commentary to=functions.%(name)s <|constrain|>json<|message|>{_JSON}",
    "pythonic": '[%(name)s(%(key)s="%(value)s")]',
}  # a call with one argument, a text


def parse(
    text: str, call_format: CallFormat, *, reasons: bool = False, tools: Tools = ()
) -> Parsed:
    """Return the content and the calls of a reply. Never raises.

    If the reply begins with ``<think>``, or the template began it so (``reasons``), calls up to
    ``</think>`` do not count. Elsewhere these marks are plain text. Reasoning in other marks is
    returned in these. The schemas of ``tools`` give the types of arguments in formats without types
    (``qwen3_coder``, ``glm``).
    """
    text = _in_tags(text, reasons)
    start = 0
    if reasons or text.lstrip().startswith("<think>"):
        end = text.find(_END)
        if end < 0:
            return Parsed(text)
        start = end + len(_END)
    reads = _READS.get(call_format)
    return _READS_TEXT[call_format](text, start, tools) if reads is None else reads(text, start)


def _in_tags(text: str, reasons: bool) -> str:
    begin = len(text) - len(text.lstrip())
    for opening, end in _REASONING.items():
        if text.startswith(opening, begin):
            rest = text[begin + len(opening) :]
            return f"{text[:begin]}<think>{rest.replace(end, _END, 1)}"
    return _ENDS.sub(_END, text, count=1) if reasons else text


def opens_reasoning(prompt: str) -> bool:
    """Return whether a reply after a prompt begins inside of reasoning."""
    return prompt.rstrip().endswith(tuple(_REASONING))


def written(name: str, key: str, value: str, call_format: CallFormat) -> str:
    """Return a call with one argument, plain text, as a model writes it."""
    return _WRITTEN[call_format] % {"name": name, "key": key, "value": value}
