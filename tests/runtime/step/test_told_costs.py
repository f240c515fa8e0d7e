"""What a run's policy is told of its devices, and what it does with it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from runtime_jobs import Workshop, checkpoints, kept_samples, run

from rollpacker.core import journal
from rollpacker.engine.base import EngineInfo
from rollpacker.job.plan.build import machine_of
from rollpacker.policy.rollout import from_journal

CARD: Any = SimpleNamespace(heads=2, kv_heads=1)
INFO = EngineInfo(
    kv_tokens=4096,
    max_length=256,
    tensor_parallel=(1,),
    latency={1: 1e-3, 64: 2e-3},
    prefill_token_s=1e-5,
    exact_seeds=True,
    context_token_s=0.0,
)
ROUNDS: dict[str, Any] = {"devices__per_node": 2, "rollout__streaming": {"group_tokens": 1}}
shop = Workshop.fixture(rows=6)


def told(shop: Workshop, info: EngineInfo = INFO, engines: int = 2, **changes: Any) -> Any:
    pool = SimpleNamespace(
        engines=range(engines), infos={1: info}, info=info, node_size=engines, transport=None
    )
    return machine_of(shop.config("told", **changes), CARD, cast(Any, pool))


@pytest.mark.parametrize(("cost", "known"), [(0.0, 0.0), (1e-6, 1e-6), (None, 0.0)])
def test_moves_are_compared_by_what_was_measured(
    shop: Workshop, cost: float | None, known: float
) -> None:
    machine = told(shop, replace(INFO, context_token_s=cost))
    assert machine.profiles[1].context_token_s == known
    assert machine.profiles[1].latency == INFO.latency


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout__streaming": {"scaling": "off"}},
        {"deterministic": True},
        {"engines": 1},
    ],
)
def test_nothing_is_compared_where_moves_gain_nothing(
    shop: Workshop, changes: dict[str, Any]
) -> None:
    assert told(shop, **changes) is None


def head(folder: Path) -> dict[str, Any]:
    first = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()[0]
    return json.loads(first)["meta"]


@pytest.fixture(scope="module")
def compared(shop: Workshop) -> Path:
    """Two steps, the second one after a resume."""
    run(shop.config("compared", steps=1, **ROUNDS))
    return run(shop.config("compared", steps=2, **ROUNDS), resume=True)[0]


def test_a_run_of_two_engines_compares_and_its_journal_tells_all_of_it(
    shop: Workshop, compared: Path
) -> None:
    off, _ = run(shop.config("off", "off", steps=1, **ROUNDS))
    folder = compared
    assert head(folder)["settings"]["machine"]["profiles"]["1"]["context_token_s"] >= 0.0
    assert checkpoints(folder)[-1] == 2
    assert [row for row in kept_samples(folder) if row[0] == 0] == kept_samples(off)
    found = journal.replay(folder / "journal.jsonl", from_journal)
    assert found.events > 0
    assert not found.differences
