"""The benchmark's offline optimum: the same split by dynamic programming and by OR-tools."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollpacker.rollmux.model.cluster import Job
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.trace import Philly, philly

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module("benchmarks.mux.optimum")


def known_jobs(count: int, seed: int) -> list[Job]:
    jobs: list[Job] = []
    for each in philly(Philly(jobs=count, mean_hours=60.0), np.random.default_rng(seed)):
        jobs.append(Job(each.spec, 0.0))
        for pair in zip(each.rollout_s[:20], each.train_s[:20], strict=True):
            jobs[-1].observed.add(float(pair[0]), float(pair[1]))
    return jobs


def by_or_tools(count: int, prices: dict[int, float]) -> float:
    cp_model = pytest.importorskip("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    chosen = {key: model.new_bool_var(str(key)) for key in prices}
    for job in range(count):
        model.add_exactly_one(var for key, var in chosen.items() if key >> job & 1)
    model.minimize(sum(round(prices[key] * 1e4) * var for key, var in chosen.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value / 1e4


@pytest.mark.parametrize("seed", [0, 1])
def test_both_solvers_agree_and_sharing_pays(benchmark: Any, seed: int) -> None:
    prices, best = benchmark.Optimum(known_jobs(5, seed), Settings(), largest=3).solve()
    assert best == pytest.approx(by_or_tools(5, prices), abs=1e-3)
    assert best < 5 * 57.04
    assert all(prices[1 << n] == pytest.approx(57.04) for n in range(5))


def test_partitions_are_counted_by_the_bell_numbers(benchmark: Any) -> None:
    assert [len(list(benchmark.partitions(list(range(n))))) for n in range(6)] == [
        1,
        1,
        2,
        5,
        15,
        52,
    ]


def test_only_gangs_of_one(benchmark: Any) -> None:
    jobs = known_jobs(1, 0)
    wide = Job(replace(jobs[0].spec, train_nodes=2), 0.0)
    with pytest.raises(ValueError, match="gangs of one"):
        benchmark.Optimum([wide], Settings())
