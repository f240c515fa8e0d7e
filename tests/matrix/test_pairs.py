"""Options that meet: every valid pair trains as it should, every other is refused in one line."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from matrix_pairs import MODE, Row, covering, every_pair, pairs
from matrix_runs import Described, Matrix, put

from rollpacker import config
from rollpacker.core import journal
from rollpacker.job.plan.build import check
from rollpacker.policy.rollout import from_journal

SEED = 3
MOST = 32
ROWS = 24
KEYS: dict[str, Any] = {
    "data.path": "{here}/several.jsonl",
    "rollout.tail_batching.eta_prompts": 2.0,
    "rollout.tail_batching.eta_responses": 1.5,
    "rollout.streaming.group_tokens": 64,
}
SMALLEST = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"function": "math"}]}


def parsed(row: Row) -> config.RunConfig:
    tree: dict[str, Any] = copy.deepcopy(SMALLEST)
    for key, value in row.items():
        put(tree, key.split("."), value)
    return config.parse(tree)


def valid(row: Row) -> bool:
    try:
        check(parsed(row))
    except ValueError:
        return False
    return True


@functools.cache
def array() -> tuple[list[Row], list[Row]]:
    return covering(valid, SEED)


def test_every_pair_is_in_a_run_or_refused() -> None:
    chosen, refused = array()
    assert set().union(*map(pairs, chosen), *map(pairs, refused)) == every_pair()
    assert len(chosen) <= MOST
    assert all(not valid(row) for row in refused), "a pair that was found in no valid row is valid"


def test_refused_pairs_are_said_in_one_line(matrix: Matrix) -> None:
    for number, row in enumerate(array()[1]):
        ran = matrix.get(Described(name=f"refused-{number}", keys=KEYS | row))
        assert ran.error, row
        assert "\n" not in ran.error
        assert not (ran.folder / "journal.jsonl").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(MOST))
def test_every_pair_trains(number: int, matrix: Matrix) -> None:
    """Every prompt is decided once, the weights move and stay finite, the journal replays."""
    chosen, _ = array()
    if number >= len(chosen):
        pytest.skip("fewer suffice")
    row = chosen[number]
    ran = matrix.get(Described(name=f"pairs-{number}", keys=KEYS | row))
    assert not ran.error, f"{row}: {ran.error}"
    kept = ran.kept.select("step", "prompt").unique()["prompt"].to_list()
    dropped = ran.table.filter(pl.col("state") == "dropped").select("step", "prompt").unique()
    assert Counter(kept + dropped["prompt"].to_list()) == Counter(f"p{i}" for i in range(ROWS))
    assert set(Counter(ran.kept.select("step", "prompt").rows()).values()) == {3}
    before, after = ran.first_weights, ran.tensors(len(ran.metrics))
    assert all(bool(tensor.isfinite().all()) for tensor in after.values())
    assert any(
        not torch.equal(after[n].float(), t.to(after[n].dtype).float()) for n, t in before.items()
    )
    assert journal.replay(Path(ran.folder) / "journal.jsonl", from_journal).differences == []
    if row[MODE] in ("exact", "off"):
        assert set(ran.table["state"]) <= {"kept", "dropped"}
