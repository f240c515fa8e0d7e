"""A trainer's examples as prompts, drawn by its sampler or by ourselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollpacker.core.types import Prompt, PromptId
from rollpacker.data.base import Row
from rollpacker.data.source import PromptSource
from rollpacker.runtime.attempts.attempts import Problems

_DOMAIN = "default"

Example = dict[str, Any]  # a row of the trainer's data set
Encode = Callable[[Sequence[Any]], Sequence[Sequence[int]]]
"""The trainer's function from prompts to token ids."""


class Given:
    """Prompts that the trainer's sampler has drawn, all for one round. ``size`` is the number of
    prompts of an epoch, 0 if unknown."""

    def __init__(self, size: int) -> None:
        self.epoch, self.passed = 0, 0.0
        self._size = size
        self._left: list[Prompt] = []

    def offer(self, prompts: Sequence[Prompt], passed: float) -> None:
        self._left = list(prompts)
        self.epoch, self.passed = int(passed), passed

    @property
    def quotas(self) -> dict[str, int]:
        return {_DOMAIN: max(1, self._size)}

    def remaining(self) -> dict[str, int]:
        return {_DOMAIN: len(self._left)}

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        count = counts[_DOMAIN]
        drawn, self._left = self._left[:count], self._left[count:]
        return tuple(drawn)

    def next_epoch(self) -> None:
        """Nothing to do: the trainer counts epochs."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do: the trainer's sampler has the position."""


class ShardedPrompts(PromptSource):
    """This process's share of each epoch's order, as long as all others. Ids are positions in the
    data set. All processes must have the same ``seed``."""

    def __init__(self, count: int, seed: int, shuffle: bool, rank: int, world: int) -> None:
        self._share = slice(rank, count // world * world, world)
        prompts = [Prompt(id=PromptId(str(n)), domain=_DOMAIN, tokens=0) for n in range(count)]
        super().__init__(prompts, seed, shuffle)

    @property
    def quotas(self) -> dict[str, int]:
        return {domain: len(order) for domain, order in self._order.items()}

    def _shuffled(self, prompts: list[Prompt]) -> list[Prompt]:
        return super()._shuffled(prompts)[self._share]


class Examples(dict[PromptId, Row]):
    """Rows by position in a data set, read on demand."""

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self._dataset = dataset

    def __missing__(self, id_: PromptId) -> Row:
        row = self[id_] = as_row(id_, self._dataset[int(id_)])
        return row


class LazilyEncoded(dict[PromptId, NDArray[np.int32]]):
    """Token ids of rows, encoded on demand."""

    def __init__(self, rows: Mapping[PromptId, Row], encode: Encode) -> None:
        super().__init__()
        self._rows, self._encode = rows, encode

    def __missing__(self, id_: PromptId) -> NDArray[np.int32]:
        (ids,) = self._encode([self._rows[id_].prompt])
        tokens = self[id_] = np.array(ids, np.int32)
        return tokens


class TrainerProblems(Problems):
    """The trainer's prompts, whose lengths are known when they are drawn."""

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        drawn = self.source.draw(counts)
        return tuple(replace(prompt, tokens=len(self.tokens[prompt.id])) for prompt in drawn)

    def forget(self) -> None:
        self.rows.clear()
        if isinstance(self.tokens, dict):
            self.tokens.clear()


def as_row(id_: PromptId, example: Example) -> Row:
    """An example as a row. Its columns hold all that reward functions need."""
    return Row(id=id_, prompt=example["prompt"], answer=None, domain=_DOMAIN, columns=example)


def given_rows(examples: Sequence[Example], size: int) -> list[Row]:
    """One row for each group of ``size`` equal examples, in order. A prompt's id is its hash, the
    same in every epoch. Later equal ones in a round are numbered."""
    rows: dict[PromptId, Row] = {}
    for example in examples[::size]:
        text = json.dumps(example["prompt"], sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
        id_, number = PromptId(digest), 1
        while id_ in rows:
            number += 1
            id_ = PromptId(f"{digest}-{number}")
        rows[id_] = as_row(id_, example)
    return list(rows.values())
