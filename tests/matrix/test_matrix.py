"""Every leaf of the configuration is set by a real run that shows what it does.

The table is ``matrix.yaml``. To add a leaf:

1. Set it in a run: a key of a run that stays valid with it, or a run of its own, ``slow: true``
   unless it must be in the default suite.
2. Say what it does there, in one expression::

       data.size @ chat: "\"13 rows\" in ran.said"

   ``ran`` has the run's metrics, samples, journal, checkpoints, summary, every call of its reward
   and what the user was told. The same expression must be false in ``plain``, which has the
   default, or in the run named by ``against``; and, as a slow test, in the same run without this
   leaf (with the key ``instead``, where that alone would be no valid run, or no control).

What takes more than an expression is a function in ``effects/``, under ``@effect``.

Leaves that no real run on a CPU can show are listed in ``EXCEPTIONS`` with the reason. The list may
only get shorter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from matrix_runs import Matrix
from matrix_table import ENTRIES, RUNS, Entry, happens
from matrix_tree import is_key_of, is_set, leaves
from matrix_whole import ELSEWHERE, EXCEPTIONS, MOST
from pydantic import Field

from rollpacker import config
from rollpacker.config import Config, DAPOConfig, RunConfig, TrainConfig

LEAVES = leaves(RunConfig)
ROOT = Path(__file__).parents[2]


def uncovered(tree: type[Config]) -> set[str]:
    """Leaves of a tree without an effect."""
    shown = {entry.leaf for entry in ENTRIES} | set(ELSEWHERE)
    return set(leaves(tree)) - shown - set(EXCEPTIONS)


def named(entry: Entry) -> str:
    return f"{entry.leaf}-{entry.run}"


def slow(entry: Entry) -> object:
    marks = [pytest.mark.slow] if entry.slow else []
    return pytest.param(entry, id=named(entry), marks=marks)


def test_every_leaf_has_a_run_that_shows_its_effect() -> None:
    assert uncovered(RunConfig) == set(), "say what they do: see the docstring of this file"


def test_what_is_shown_elsewhere_is_there() -> None:
    assert set(ELSEWHERE) <= set(LEAVES)
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")


def test_nothing_is_in_the_table_that_is_not_in_the_tree() -> None:
    assert {entry.leaf for entry in ENTRIES} | set(EXCEPTIONS) <= set(LEAVES)
    assert {entry.leaf for entry in ENTRIES} & set(EXCEPTIONS) == set()
    assert {run for entry in ENTRIES for run in (entry.run, entry.against)} <= set(RUNS)


def test_exceptions_get_fewer() -> None:
    assert len(EXCEPTIONS) == MOST, "lower MOST where one is gone; never raise it"
    assert all(len(reason.split()) > 5 for reason in EXCEPTIONS.values())


def test_a_new_leaf_is_noticed() -> None:
    class Later(TrainConfig):
        bold: bool = False
        """Take larger steps."""

    class NewAlgorithm(DAPOConfig):
        temper: float = 0.0

    class LaterTrain(TrainConfig):
        algorithm: DAPOConfig | config.GRPOConfig | NewAlgorithm = Field(
            default=config.GRPOConfig()
        )

    class Planted(RunConfig):
        train: Later = Later()

    class PlantedAlgorithm(RunConfig):
        train: LaterTrain = LaterTrain()

    assert uncovered(Planted) == {"train.bold"}
    assert "train.algorithm[dapo].temper" in uncovered(PlantedAlgorithm)


def test_every_run_sets_its_leaves() -> None:
    """To something else than its default, and the control has another value: the next test."""
    missed = [
        named(entry)
        for entry in ENTRIES
        if not any(is_key_of(key, entry.leaf) for key in RUNS[entry.run].keys)
    ]
    assert missed == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("entry", map(slow, ENTRIES))
def test_it_does_what_it_says(entry: Entry, matrix: Matrix) -> None:
    """And a run that has another value does not."""
    ran = matrix.get(RUNS[entry.run])
    assert not ran.broken
    entry.holds(ran)
    assert ran.config is not None
    assert is_set(ran.config, entry.leaf)
    control = matrix.get(RUNS[entry.against])
    assert not happens(entry.holds, control), f"{entry.against} shows it too: it checks nothing"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("entry", ENTRIES, ids=named)
def test_nothing_else_has_this_effect(entry: Entry, matrix: Matrix) -> None:
    """The same run without this leaf alone."""
    assert not happens(entry.holds, matrix.get(entry.without)), "something else does this"
