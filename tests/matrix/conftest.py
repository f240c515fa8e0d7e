"""The runs of this session, made when somebody looks at them."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# The small job, programs as responses, and a real daemon are those of other rooms' tests.
sys.path[:0] = [str(TESTS / room) for room in ("runtime", "reward", "mux_client")]

from effects_data import prepare  # noqa: E402
from matrix_runs import Matrix  # noqa: E402
from matrix_table import RUNS  # noqa: E402


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix") / "here", RUNS, prepare)
