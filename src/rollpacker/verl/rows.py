"""Rows of verl's data loader that are drawn, and those that wait for a later round."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from verl.utils import tensordict_utils as tu  # pyright: ignore[reportMissingImports]

from rollpacker.core.types import Prompt, PromptId
from rollpacker.verl.settings import DOMAIN

_IDENTITY = ("raw_prompt", "data_source", "reward_model")
"""Columns by which rows are told apart."""


class RowQueue:
    """Draws rows, and keeps them until they are trained on.

    A row's ``uid`` is its prompt's id: a hash of the row, the same in every epoch and after a
    resume, where verl has a new one for each draw. It groups responses as verl's does.

    Args:
        fetch: the next row of the data loader, which begins anew after the last one: a TensorDict
            of one row.
        size: rows of an epoch.
    """

    def __init__(self, fetch: Callable[[], Any], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._drawn = 0
        self.epoch = 0
        """Epochs begun before this one."""
        self._rows: dict[PromptId, Any] = {}

    @property
    def remaining(self) -> int:
        return self._size - self._drawn

    def draw(self, count: int) -> list[Prompt]:
        """The next rows; no more than ``remaining``."""
        assert count <= self.remaining
        prompts: list[Prompt] = []
        for _ in range(count):
            row = self._fetch()
            id_ = self._name(row)
            row["uid"] = tu.get_tensordict({"uid": np.array([id_], dtype=object)})["uid"]
            self._rows[id_] = row
            prompts.append(Prompt(id=id_, domain=DOMAIN))
        self._drawn += count
        return prompts

    def _name(self, row: Any) -> PromptId:
        found = {column: row[column][0] for column in _IDENTITY if column in row}
        text = json.dumps(found, sort_keys=True, default=_plain)
        digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()
        id_, number = PromptId(digest), 1
        while id_ in self._rows:  # an equal row, which waits
            number += 1
            id_ = PromptId(f"{digest}-{number}")
        return id_

    def batch(self, prompts: Sequence[PromptId]) -> Any:
        """These rows, in order: a TensorDict."""
        rows = [self._rows[prompt] for prompt in prompts]
        return rows[0].clone() if len(rows) == 1 else tu.concat_tensordict(rows)

    def forget(self, prompts: Iterable[PromptId]) -> None:
        for prompt in prompts:
            del self._rows[prompt]

    def next_epoch(self) -> None:
        """Pass over what is left of this one; nothing waits any more."""
        for _ in range(self.remaining):
            self._fetch()
        self._rows.clear()
        self._drawn, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "epoch": self.epoch, "rows": dict(self._rows)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn, self.epoch = state["drawn"], state["epoch"]
        self._rows = dict(state["rows"])


def _plain(value: object) -> Any:
    """Of what a row may hold, what JSON lacks."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
