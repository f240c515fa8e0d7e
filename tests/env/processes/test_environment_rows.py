"""A row's columns come to an environment as they are, whatever they are."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from pool_driving import TOKENIZER, Driver, pool_of

from rollpacker.env.messages import packed

SEER = """
class Seer:
    def reset(self, row):
        return [{"role": "user", "content": repr(row)}]
    async def step(self, reply): ...
    async def close(self): ...
"""


def test_an_environment_sees_its_row_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "seer.py"
    file.write_text(SEER)
    row = {
        "when": datetime(2026, 1, 2, tzinfo=UTC),
        "pair": (1, "a"),
        "price": Decimal("1.50"),
        "board": np.zeros((2, 2), np.int8),
        "more": {3: {"x"}},
    }

    async def seen() -> str:
        driver = Driver(pool)
        answer = (await driver.answer(driver.begin(**row))).answer
        return TOKENIZER.decode(np.frombuffer(answer.prompt, np.int32))

    pool = pool_of(f"{file}:Seer")
    try:
        pool.wait_ready()
        assert repr(row) in asyncio.run(seen())
    finally:
        pool.close()


def test_a_column_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match="data: column 'lock' cannot be sent") as error:
        packed({"answer": "1", "lock": Lock()})
    assert "pickling its lock failed: TypeError" in str(error.value)
    assert "\n" not in str(error.value)
