"""The canonical row that every source is turned into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollpacker.core.types import PromptId


class DataError(ValueError):
    """The user's data is wrong; the message names the file, the row and the key to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One problem.

    Args:
        id: the row's ``id`` column, or a hash of the row.
        prompt: text or chat messages.
        answer: the reference answer; None where the rewards need none.
        domain: task domain.
        columns: every column by name, for reward functions (``answer`` included).
    """

    id: PromptId
    prompt: str | list[dict[str, str]]
    answer: Any
    domain: str
    columns: Mapping[str, Any]
