"""The runs of this session, made when somebody looks at them."""

import pytest
from effects_data import prepare
from matrix_runs import Matrix
from matrix_table import RUNS


@pytest.fixture(scope="session")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix") / "here", RUNS, prepare)
