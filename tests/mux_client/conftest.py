"""One daemon for the tests that do not kill it."""

from collections.abc import Iterator

import pytest
from mux_real_daemon import Daemon


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    running = Daemon(tmp_path_factory.mktemp("mux"))
    yield running
    running.stop()
