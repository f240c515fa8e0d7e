"""KV blocks with reference counts, and the prompt prefixes that groups share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollpacker.engine.mini.runner import Ints


class Blocks:
    """Free list of KV blocks. A block is free when nothing refers to it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take that many blocks; there must be as many."""
        assert count <= len(self._free)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: list[int]) -> list[int]:
        """Refer to blocks that are in use once more."""
        for block in blocks:
            assert self._references[block] > 0
            self._references[block] += 1
        return list(blocks)

    def drop(self, blocks: list[int]) -> None:
        """Stop referring to blocks."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)


@dataclass(slots=True, eq=False)
class Prefix:
    """A group's prompt: its KV while it is cached, and how many held requests use it.

    Attributes:
        prompt: token ids.
        members: requests of the group that the engine holds.
        blocks: full blocks before the prompt's last token; empty when not cached.
        cached: whether ``blocks`` may be shared.
        tail: copy of the block of the prompt's last token, to be copied by each member.
        hidden: last hidden state (1, hidden) of the prompt, in the runner's own array.
    """

    prompt: Ints
    members: int = 0
    cached: bool = False
    blocks: list[int] = field(default_factory=list[int])
    tail: int | None = None
    hidden: Any = None

    def forget(self, blocks: Blocks) -> None:
        """Give the cached KV back."""
        blocks.drop(self.blocks)
        if self.tail is not None:
            blocks.drop([self.tail])
        self.blocks, self.tail, self.hidden, self.cached = [], None, None, False
