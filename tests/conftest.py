"""How the suite runs: one core a process, examples by profile, in parts."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

# Pytest workers and what they start share the machine. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# The same examples every time, so that the default suite finds nothing by chance;
# ``make test-slow`` looks further. Tests that cost more take a part of ``max_examples``.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=50, derandomize=True, **_ANY_SPEED)
settings.register_profile("thorough", max_examples=1000, **_ANY_SPEED)
settings.load_profile("ci")

# Hosts that are there only where their plug-in is tested (``make test-trl``, ``test-verl``).
_HOSTS = ("trl", "verl")
collect_ignore_glob = [f"{host}_plugin/*" for host in _HOSTS if find_spec(host) is None]


@pytest.fixture
def calls() -> Callable[[Callable[[], object]], int]:
    """``calls(act)``: how many functions ``act`` calls. A cost that other work does not change."""

    def count(act: Callable[[], object]) -> int:
        found = Counter()
        sys.setprofile(lambda _frame, event, _arg: found.update([event]))
        try:
            act()
        finally:
            sys.setprofile(None)
        return found["call"] + found["c_call"]

    return count


def _no_name_of_a_test() -> None:
    """Pytest changes it all the time: each test would begin a fork server of its own, as for any
    change of the environment."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Iterator[object]:
    _no_name_of_a_test()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[object]:
    _no_name_of_a_test()
    return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="every n-th file from the k-th on: k/n")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is imported now stays to the end: nothing looks through it for garbage, and what tests
    leave behind is looked for less often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(50_000, 20, 20)


_FIRST = (
    "test_engine_contract.py",  # compiles the kernels, which the other processes would do again
    # Without any of them, meanwhile; long ones, which would be waited for at the end.
    "test_mux_programs.py",
    "test_sandbox_hostile.py",
    "test_mux_examples.py",
    "test_mux_kills.py",
    "test_fresh_process.py",
    "test_extending.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Only the files of this part, of those that -m has left; what takes longest comes first."""
    part, _, parts = config.getoption("--part").partition("/")
    try:
        chosen = int(part) - 1
        files = set(sorted({item.path for item in items})[chosen :: int(parts)])
        assert 0 <= chosen < int(parts)
    except (ValueError, AssertionError):
        raise pytest.UsageError("--part is k/n with 1 <= k <= n, for instance 2/4") from None
    left_out = [item for item in items if item.path not in files]
    items[:] = [item for item in items if item.path in files]
    config.hook.pytest_deselected(items=left_out)
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(_FIRST)))
