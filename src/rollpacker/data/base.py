"""The canonical row of every source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.chat import Message
from rollpacker.core.types import PromptId

Record = dict[str, Any]  # a row as it was read


class DataError(ValueError):
    """The user's data is wrong. The message names the file, the row and the key to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem.

    Args:
        id: the row's ``id`` column, or a hash of the row.
        answer: the reference answer, or None if the rewards need none.
        columns: every column by name, for reward functions (``answer`` included).
        tools: JSON schemas of tools for the chat template.
        template_kwargs: the row's own arguments of the chat template.
    """

    id: PromptId
    prompt: str | list[Message]
    answer: Any
    domain: str
    columns: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def whole_text(text: str, what: str) -> str:
    """Return ``text``. Raises ``DataError``, with ``what`` first, if it cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{what} holds half a character (a lone surrogate)") from None
    return text
