"""KV blocks with reference counts, and the prompt prefixes that groups share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollpacker.engine.base import Ints


class Blocks:
    """Free list of KV blocks. A block is free when nothing refers to it.

    Attributes:
        count: of all blocks.
        spare: blocks that nothing but parked references hold.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.spare = 0
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._parked = [0] * count

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
            assert not self._only_parked(block)
            self._references[block] += 1
        return list(blocks)

    def drop(self, blocks: list[int]) -> None:
        """Stop referring to blocks."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
            else:
                self.spare += self._only_parked(block)

    def park(self, blocks: list[int]) -> None:
        """One reference to each may be given up at any time from now on."""
        for block in blocks:
            assert not self._only_parked(block)
            self._parked[block] += 1
            self.spare += self._only_parked(block)

    def unpark(self, blocks: list[int]) -> None:
        """These references are like others again."""
        for block in blocks:
            self.spare -= self._only_parked(block)
            self._parked[block] -= 1

    def idle(self, blocks: list[int]) -> int:
        """How many of these nothing but parked references hold."""
        return sum(map(self._only_parked, blocks))

    def _only_parked(self, block: int) -> bool:
        return self._references[block] == self._parked[block]


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
