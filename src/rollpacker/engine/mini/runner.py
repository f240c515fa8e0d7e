"""What the scheduler needs of a device: run rows, sample, copy blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from rollpacker.engine.base import Floats, Ints
from rollpacker.engine.sampling.race import RowDraws


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Tokens to run, each (n,): rows of one sequence in order of their positions.

    Args:
        tokens: ids.
        positions: place in the sequence.
        slots: row of the block tables.
        keep: (m,) rows whose last hidden state is wanted.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    keep: Ints


class Runner(Protocol):
    """A model on a device with its KV blocks. Hidden states stay in the device's own arrays."""

    block_size: int
    exact: bool
    """A row's results do not depend on what runs beside it, bit by bit."""

    equal_rows: bool
    """Sequences with several rows each run together only where all have as many."""

    def kv_bytes(self) -> int:
        """Bytes of one block."""
        ...

    def free_bytes(self, sharers: int) -> int:
        """Memory that is free on the device, for one of so many processes that share it."""
        ...

    def allocate(self, blocks: int) -> None:
        """Allocate the KV blocks, zeroed."""
        ...

    def release(self) -> None:
        """Give their memory back."""
        ...

    def refresh(self, *, force: bool = False) -> None:
        """Take up changes of the model's weights."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        ...

    def forward(self, rows: TokenRows, tables: Ints) -> Any:
        """Normed last hidden states (m, hidden) of the rows to keep."""
        ...

    def join(self, parts: list[Any]) -> Any:
        """Hidden states (k, hidden) of several calls in one array."""
        ...

    def sample(self, hidden: Any, rows: Ints, draws: RowDraws) -> tuple[Ints, Floats]:
        """Tokens and their logprobs, each (d,), drawn from the hidden states in ``rows``, (d,)."""
        ...
