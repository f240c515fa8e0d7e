"""Tool calls in a model's text: parsed, never run, and never a reason to raise."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import get_args

from rollpacker.config.environment import CallFormat
from rollpacker.env.calls.call import Call, Parsed
from rollpacker.env.calls.formats import (
    deepseek_calls,
    gemma_calls,
    glm_calls,
    harmony,
    json_calls,
    mistral_calls,
    python_calls,
    xml_calls,
)
from rollpacker.env.calls.formats.typed import Tools

FORMATS: tuple[CallFormat, ...] = get_args(CallFormat)

_END = "</think>"
_REASONING = {"<think>": _END, "[THINK]": "[/THINK]", "<|channel>thought": "<channel|>"}
"""How reasoning begins and ends: with most models, Mistral's, and Gemma 4."""
_ENDS = re.compile("|".join(map(re.escape, _REASONING.values())))

_READS: Mapping[CallFormat, Callable[[str, int], Parsed]] = {
    "hermes": json_calls.hermes,
    "llama3": json_calls.llama3,
    "mistral": mistral_calls.mistral,
    "mistral_v11": mistral_calls.mistral_v11,
    "functiongemma": gemma_calls.functiongemma,
    "gemma4": gemma_calls.gemma4,
    "deepseek_v3": deepseek_calls.deepseek_v3,
    "deepseek_v31": deepseek_calls.deepseek_v31,
    "harmony": harmony.harmony,
    "pythonic": python_calls.pythonic,
}
_READS_TEXT: Mapping[CallFormat, Callable[[str, int, Tools], Parsed]] = {
    "qwen3_coder": xml_calls.qwen3_coder,
    "glm": glm_calls.glm,
}
"""Formats whose arguments are plain text."""
_WRITES: Mapping[CallFormat, Callable[[Call], str]] = {
    "hermes": json_calls.write_hermes,
    "llama3": json_calls.write_llama3,
    "qwen3_coder": xml_calls.write_xml,
    "glm": glm_calls.write_glm,
    "mistral": mistral_calls.write_mistral,
    "mistral_v11": mistral_calls.write_mistral_v11,
    "functiongemma": gemma_calls.write_functiongemma,
    "gemma4": gemma_calls.write_gemma4,
    "deepseek_v3": deepseek_calls.write_deepseek_v3,
    "deepseek_v31": deepseek_calls.write_deepseek_v31,
    "harmony": harmony.write_harmony,
    "pythonic": python_calls.write_pythonic,
}


def parse(
    text: str, call_format: CallFormat, *, reasons: bool = False, tools: Tools = ()
) -> Parsed:
    """The content and the calls of a reply. Whatever the text is, this does not raise.

    Where it begins with ``<think>``, or the template has begun it so (``reasons``), calls up to
    ``</think>`` are not meant; elsewhere these are words like others. Reasoning in other marks is
    shown in these. The schemas of ``tools`` say what arguments are, where the format does not
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
    """With the marks around reasoning that most models have."""
    begin = len(text) - len(text.lstrip())
    for opening, end in _REASONING.items():
        if text.startswith(opening, begin):
            rest = text[begin + len(opening) :]
            return f"{text[:begin]}<think>{rest.replace(end, _END, 1)}"
    return _ENDS.sub(_END, text, count=1) if reasons else text


def opens_reasoning(prompt: str) -> bool:
    """Whether a reply behind a prompt begins inside of reasoning."""
    return prompt.rstrip().endswith(tuple(_REASONING))


def written(call: Call, call_format: CallFormat) -> str:
    """A call as a model writes it."""
    return _WRITES[call_format](call)


def replied(call_format: CallFormat, reasoning: str, content: str, call: Call | None) -> str:
    """A reply as a model writes it, of parts that may be empty."""
    if call_format == "harmony":
        return harmony.write_reply(reasoning, content, call)
    if reasoning:
        gemma = call_format == "gemma4"
        reasoning = (
            f"<|channel>thought\n{reasoning}\n<channel|>"
            if gemma
            else f"<think>\n{reasoning}\n</think>\n\n"
        )
    if call is None:
        return reasoning + content
    return f"{reasoning}{content}{content and chr(10)}{written(call, call_format)}"
