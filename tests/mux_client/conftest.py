"""One daemon for the tests that do not kill it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mux_real_daemon import Daemon

sys.path.append(str(Path(__file__).parents[1] / "runtime"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    running = Daemon(tmp_path_factory.mktemp("mux"))
    yield running
    running.stop()
