"""From token ids to the texts that people read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollpacker.core.types import PromptId
from rollpacker.data.base import Row
from rollpacker.response_text import backend
from rollpacker.runtime.attempts.attempts import Trajectory

_ANSWER = 400
"""Characters of an answer that are kept."""


class Texts:
    """The texts of a step's attempts; each prompt is decoded once.

    Args:
        tokenizer: of transformers.
        read: decodes responses, as rewards are given them.
        rows: the problems.
    """

    def __init__(
        self,
        tokenizer: Any,
        read: Callable[[Sequence[int]], str],
        rows: Mapping[PromptId, Row],
    ) -> None:
        self._decode = backend(tokenizer).decode
        self._response = read
        self._rows = rows
        self._prompts: dict[PromptId, str] = {}

    def begin(self) -> None:
        """A step begins: forget the last one's prompts."""
        self._prompts.clear()

    def prompt(self, attempt: Trajectory) -> str:
        """The prompt as the model saw it, special tokens included."""
        if attempt.conversation is not None and attempt.conversation.changed:
            return self._read(attempt)
        text = self._prompts.get(attempt.prompt)
        if text is None:
            text = self._prompts[attempt.prompt] = self._read(attempt)
        return text

    def _read(self, attempt: Trajectory) -> str:
        return self._decode(attempt.prompt_tokens.tolist(), skip_special_tokens=False)

    def completion(self, attempt: Trajectory) -> str | None:
        """The response, as the rewards were given it; None of an attempt that gave nothing back."""
        if attempt.output is None:
            return None
        return self._response(attempt.output.tokens.tolist())

    def answer(self, attempt: Trajectory) -> str | None:
        """The problem's reference answer; of a long one, such as a program's tests, its start."""
        row = self._rows.get(attempt.prompt)
        if row is None or row.answer is None:
            return None
        text = row.answer if isinstance(row.answer, str) else _begun(row.answer)
        return text if len(text) <= _ANSWER else f"{text[:_ANSWER]} ..."


def _begun(value: Any) -> str:
    """A value as JSON, no more of it than is kept: tests may be many megabytes."""
    text = ""
    encoder = json.JSONEncoder(ensure_ascii=False, default=str, skipkeys=True)
    for piece in encoder.iterencode(value):
        text += piece
        if len(text) > _ANSWER:
            break
    return text
