"""Rows of a loader: ids that stay, epochs, and what waits over a checkpoint."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from verl.utils import tensordict_utils as tu

from rollpacker.verl.trainer import RowQueue

pytestmark = pytest.mark.verl


def loader(texts: list[str]) -> Any:
    """As verl's: one row at a time, over and over, with an id that is new each time."""

    def fetch() -> Any:
        number, text = next(rows)
        columns: dict[str, Any] = {
            "raw_prompt": [{"role": "user", "content": text}],
            "uid": f"drawn-{number}",
            "data_source": "numbers",
        }
        return tu.get_tensordict({name: _column(value) for name, value in columns.items()})

    rows = enumerate(itertools.cycle(texts))
    return fetch


def _column(value: Any) -> Any:
    column = np.empty(1, dtype=object)
    column[0] = value
    return column


def test_a_row_has_the_same_id_in_every_epoch() -> None:
    rows = RowQueue(loader(["a", "b", "c"]), 3)
    first = [prompt.id for prompt in rows.draw(3)]
    assert len(set(first)) == 3
    assert list(rows.batch(first)["uid"]) == first
    rows.forget(first)
    rows.next_epoch()
    assert [prompt.id for prompt in rows.draw(3)] == first
    assert rows.epoch == 1


def test_equal_rows_that_wait_together_have_ids_of_their_own() -> None:
    rows = RowQueue(loader(["a", "a"]), 2)
    first, second = (prompt.id for prompt in rows.draw(2))
    assert second == f"{first}-2"


def test_what_is_left_of_an_epoch_is_passed_over() -> None:
    rows = RowQueue(loader(["a", "b", "c", "d", "e"]), 5)
    drawn = [prompt.id for prompt in rows.draw(3)]
    assert rows.remaining == 2
    rows.next_epoch()
    assert rows.remaining == 5
    assert [prompt.id for prompt in rows.draw(3)] == drawn


def test_rows_that_wait_are_there_after_a_resume() -> None:
    rows = RowQueue(loader(["a", "b", "c"]), 3)
    ids = [prompt.id for prompt in rows.draw(2)]
    rows.forget(ids[:1])
    again = RowQueue(loader(["c"]), 3)
    again.load_state_dict(rows.state_dict())
    assert again.remaining == 1
    (prompt,) = again.batch(ids[1:])["raw_prompt"]
    assert prompt == [{"role": "user", "content": "b"}]
    assert [prompt.id for prompt in again.draw(1)] not in (ids[:1], ids[1:])
