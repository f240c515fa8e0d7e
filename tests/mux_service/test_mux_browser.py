"""The dashboard in a real browser: a job from its submission to its end."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mux_fleet import Daemon, Link

webdriver = pytest.importorskip("selenium.webdriver")
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")
pytestmark = pytest.mark.skipif(
    DRIVER is None or BROWSER is None, reason="needs chromium and chromedriver"
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    folder = f"--user-data-dir={tmp_path_factory.mktemp('browser') / 'profile'}"
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", folder):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def browser(started: Any) -> Any:
    """One for all tests; each has a daemon, and with it an origin, of its own."""
    started.get("about:blank")
    for log in ("browser", "performance"):
        started.get_log(log)
    return started


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "state", ttl=60.0)
    made.start()
    yield made
    made.kill()


def text(browser: Any, element: str) -> str:
    return browser.execute_script(f"return document.getElementById('{element}').innerText")


def eventually(look: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not look():
        assert time.monotonic() < end
        time.sleep(0.1)


def requests_of(browser: Any, page: str) -> list[str]:
    """Addresses that documents of a page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return [each["request"]["url"] for each in sent if each["documentURL"].startswith(page)]


def run_phase(link: Link, phase: str, key: str) -> None:
    body = {"phase": phase}
    _, permit = link.until_answered("POST", "/v1/jobs/math-7b/permits", body, f"{key}-ask")
    path = f"/v1/permits/{permit['token']}/finish"
    assert link.until_answered("POST", path, {"seconds": 0.5}, f"{key}-done")[0] == 200


def test_a_job_from_submission_to_end(daemon: Daemon, browser: Any) -> None:
    link = Link(daemon.port, daemon.token)
    browser.get(f"http://127.0.0.1:{daemon.port}/#token={daemon.token}")
    eventually(lambda: "No live jobs" in text(browser, "jobs"))
    assert daemon.token not in browser.current_url
    spec = {"id": "math-7b", "worst_rollout_s": 1.0, "worst_train_s": 1.0, "iterations": 1}
    link.until_answered("POST", "/v1/jobs", spec, "submit")
    eventually(lambda: "math-7b" in text(browser, "jobs"))
    assert "$57.04/h" in text(browser, "tiles")
    run_phase(link, "rollout", "r")
    run_phase(link, "train", "t")
    eventually(lambda: "1 / 1" in text(browser, "jobs"))
    bars = "return document.querySelectorAll('#gantt rect.phase.done').length"
    eventually(lambda: browser.execute_script(bars) == 2)
    browser.execute_script("document.querySelector('#jobs a').click()")
    eventually(lambda: text(browser, "job-name") == "math-7b")
    eventually(
        lambda: (
            browser.execute_script("return document.querySelectorAll('#job-recent rect').length")
            == 2
        )
    )
    link.until_answered("POST", "/v1/jobs/math-7b/end", {}, "end")
    eventually(lambda: "ended" in text(browser, "job-tiles"))
    browser.execute_script("location.hash = '#/'")
    eventually(lambda: "math-7b" in text(browser, "ended"))
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert complaints == []
    asked = requests_of(browser, f"http://127.0.0.1:{daemon.port}/")
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith(f"http://127.0.0.1:{daemon.port}/")] == []


def test_without_a_token_it_asks_for_one(daemon: Daemon, browser: Any) -> None:
    browser.get(f"http://127.0.0.1:{daemon.port}/")
    form = "return document.getElementById('login').hidden"
    eventually(lambda: browser.execute_script(form) is False)
    field = browser.find_element("id", "token")
    field.send_keys("wrong-wrong-wrong-wrong")
    field.submit()
    eventually(lambda: "not valid" in text(browser, "login-error"))
    field.clear()
    field.send_keys(daemon.token)
    field.submit()
    eventually(lambda: "No live jobs" in text(browser, "jobs"))


def test_a_dead_daemon_is_said_to_be_dead(daemon: Daemon, browser: Any) -> None:
    browser.get(f"http://127.0.0.1:{daemon.port}/#token={daemon.token}")
    eventually(lambda: "No live jobs" in text(browser, "jobs"))
    daemon.kill()
    eventually(lambda: "No answer from the daemon" in text(browser, "banner"))
    daemon.start()
    eventually(lambda: browser.execute_script("return document.getElementById('banner').hidden"))
