import sys
from collections.abc import Iterator

import pytest

from rollpacker.sandbox import Level, Limits, Sandbox, strongest_level

SMALL = Limits(memory_mb=256, output_mb=4, idle_s=0.5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform != "linux":
        for item in items:
            if "sandbox" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="the code sandbox needs Linux"))


@pytest.fixture(scope="session")
def level() -> Level:
    """The strongest that this machine has."""
    found = strongest_level()
    assert found is not None, "no level works on this machine"
    return found


@pytest.fixture(scope="session")
def sandbox(level: Level) -> Iterator[Sandbox]:
    """Of all tests that only run programs: whatever one of them does, the next one works."""
    with Sandbox(level, limits=SMALL, check=False) as made:
        yield made
