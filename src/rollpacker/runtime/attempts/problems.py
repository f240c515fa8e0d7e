"""The run's prompts: rows, their tokens, and the order in which they are drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import Prompt, PromptId
from rollpacker.data.base import Message, Row
from rollpacker.data.source import PromptStream


class Problems:
    """Rows by id, encoded, with the source that draws them.

    Args:
        rows: the problems; by id already where they are read when they are asked for.
        tokens: encoded prompt of each row, shape (P,), int32.
        source: draws each prompt once an epoch.
        chat: the chat messages of a row, for environments; None where there are none.
    """

    def __init__(
        self,
        rows: Sequence[Row] | dict[PromptId, Row],
        tokens: Mapping[PromptId, NDArray[np.int32]],
        source: PromptStream,
        chat: Callable[[Row], list[Message]] | None = None,
    ) -> None:
        self.rows = rows if isinstance(rows, dict) else {row.id: row for row in rows}
        self.tokens = tokens
        self.source = source
        self.chat = chat

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(tokens) for tokens in self.tokens.values())

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        return tuple(self.source.draw(counts))

    def remaining(self) -> dict[str, int]:
        """Fresh prompts of each domain left in this epoch."""
        return dict(self.source.remaining())
