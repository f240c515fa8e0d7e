"""What a response says after it has thought: the part that built-in rewards read."""

from __future__ import annotations

import re

CLOSE = "</think>"
_NAME = (
    r"(?:\w+:)?(?:think(?:ing)?|thoughts?|reasoning|reflection|rationale|scratchpad|analysis|cot)"
)
_OPENS = re.compile(
    rf"<[|｜]?{_NAME}[|｜]?>|\[THINK\]|◁think▷|<\|(?:begin_of_thought|start_thinking|inner_prefix)\|>"
    r"|<\|channel\|>(?!final\b)[^<>]{0,40}<\|message\|>",
    re.IGNORECASE,
)
_CLOSES = re.compile(
    rf"(?:</|<[|｜]/){_NAME}[|｜]?>|\[/THINK\]|◁/think▷|<\|(?:end_of_thought|end_thinking|inner_suffix)\|>"
    r"|<\|channel\|>final\b[^<>]{0,40}<\|message\|>",
    re.IGNORECASE,
)
"""The marks that open models write around what they think: DeepSeek's, Qwen's and Seed's tags,
Magistral's, Kimi's, Sky-T1's, Command's and Apertus's tokens, and the channels of gpt-oss."""


def after_thinking(text: str) -> str:
    """The text after the last mark that closes the thinking; without one, what stands before a mark
    that opens it and was never closed, as in a response that was cut off, but for an ``<answer>``
    behind that.

    A model whose template opens the thinking writes no ``<think>``: all of it counts then.
    """
    text = text.rpartition(CLOSE)[2]  # most thinking ends so, and is not looked through
    after = text[max((mark.end() for mark in _CLOSES.finditer(text)), default=0) :]
    opened = _OPENS.search(after)
    if opened is None:
        return after
    answer = after.rfind("<answer>", opened.end())
    return after[answer:] if answer >= 0 else after[: opened.start()]
