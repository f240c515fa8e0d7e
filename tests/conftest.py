"""How the suite runs: one core a process, examples by profile, in parts."""

import gc
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Pytest workers and what they start share the machine. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

# The same examples every time, so that the default suite finds nothing by chance;
# ``make test-slow`` looks further. Tests that cost more take a part of ``max_examples``.
_ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=25, derandomize=True, **_ANY_SPEED)
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


@pytest.fixture(scope="session")
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium")
    webdriver = pytest.importorskip("selenium.webdriver")
    if driver is None or browser is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    folder = f"--user-data-dir={tmp_path_factory.mktemp('browser') / 'profile'}"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", folder):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield made
    made.quit()


@pytest.fixture
def chromium(_started: Any) -> Any:
    """A browser, one for all tests, which has forgotten what it logged."""
    _started.get("about:blank")
    for log in ("browser", "performance"):
        _started.get_log(log)
    return _started


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", help="every n-th file from the k-th on: k/n")
    says = "write the seconds of each file into tests/durations.json"
    parser.addoption("--note-durations", action="store_true", help=says)


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


DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each file below this folder: which ones take long counts, not how long."""

_FIRST = (
    "test_engine_contract.py",  # compiles the kernels, which the other processes would do again
    # Without any of them, meanwhile.
    "test_mux_programs.py",
    "test_sandbox_hostile.py",
)


def _longest_first(items: list[pytest.Item]) -> None:
    """So that nobody waits for a long file at the end; one that is not known may be long."""
    known = json.loads(DURATIONS.read_text(encoding="utf-8"))
    first = {name: place for place, name in enumerate(_FIRST)}

    def place(item: pytest.Item) -> tuple[int, float]:
        seconds = known.get(item.nodeid.partition("::")[0].removeprefix("tests/"), math.inf)
        return first.get(item.path.name, len(first)), -seconds

    items.sort(key=place)  # those of a file stay together: no two files are mixed


class Durations:
    """Adds up what each file takes and writes it down at the end (``--note-durations``)."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        self._seconds[file] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Files that did not run now keep what they had; those that are gone go."""
        known = json.loads(DURATIONS.read_text(encoding="utf-8"))
        known |= {file: round(seconds) for file, seconds in self._seconds.items()}
        kept = {file: known[file] for file in sorted(known) if (DURATIONS.parent / file).exists()}
        DURATIONS.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--note-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


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
    _longest_first(items)
