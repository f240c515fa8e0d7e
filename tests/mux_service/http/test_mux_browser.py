"""The dashboard in a real browser: a job from its submission to its end."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mux_fleet import Daemon, Link

pytestmark = pytest.mark.wide
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b>x</b>"


@pytest.fixture
def browser(chromium: Any) -> Any:
    """Each test has a daemon, and with it an origin, of its own."""
    return chromium


def serving(folder: Path, inventory: Any = None) -> Iterator[Daemon]:
    file = folder / "nodes.yaml"
    if inventory is not None:
        file.write_text(yaml.safe_dump(inventory))
    made = Daemon(folder / "state", ttl=60.0, inventory=None if inventory is None else file)
    made.start()
    yield made
    made.kill()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    yield from serving(tmp_path)


@pytest.fixture
def named(tmp_path: Path) -> Iterator[Daemon]:
    """Two teams, one with a name that is no name, and two nodes."""
    nodes = [
        {"name": "h20-00", "pool": "rollout", "rack": HOSTILE},
        {"name": "h800-00", "pool": "train", "labels": {"nvlink": HOSTILE}},
    ]
    teams = [{"name": "math", "rollout": 1, "train": 1}, {"name": HOSTILE}]
    yield from serving(tmp_path, {"nodes": nodes, "teams": teams})


@pytest.fixture
def many(tmp_path: Path) -> Iterator[Daemon]:
    nodes = [
        {"name": "h20-[000-099]", "pool": "rollout"},
        {"name": "h800-[000-099]", "pool": "train"},
    ]
    yield from serving(tmp_path, {"nodes": nodes})


def visit(browser: Any, daemon: Daemon, view: str) -> None:
    """One of the views, by a daemon that this browser knows already."""
    browser.execute_script(f"location.hash = '#/{view}'")


def sign_in(browser: Any, daemon: Daemon) -> None:
    browser.get(f"http://127.0.0.1:{daemon.port}/#token={daemon.token}")
    eventually(lambda: browser.execute_script("return !document.getElementById('cluster').hidden"))


def complaints(browser: Any) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


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
    assert "done" in text(browser, "ended")
    assert complaints(browser) == []
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


def two_jobs(link: Link) -> None:
    """One that has the nodes, and one that waits for them."""
    spec = {"id": "one", "worst_rollout_s": 90, "worst_train_s": 60, "slo": 1.0, "iterations": 9}
    for more in ({"team": "math"}, {"id": "two", "team": HOSTILE, "owner": HOSTILE, "priority": 3}):
        assert link.until_answered("POST", "/v1/jobs", spec | more, f"submit-{len(more)}")[0] == 201


def test_queue_teams_and_jobs_are_shown_as_they_are(named: Daemon, browser: Any) -> None:
    link = Link(named.port, named.token)
    two_jobs(link)
    sign_in(browser, named)
    visit(browser, named, "queue")
    eventually(lambda: "no group can take it" in text(browser, "queue-jobs"))
    shown = text(browser, "queue-jobs")
    assert "two" in shown
    assert HOSTILE in shown
    assert "1 rollout + 1 train" in shown
    assert browser.execute_script("return document.activeElement.innerText").startswith("Queue")
    visit(browser, named, "teams")
    eventually(lambda: "1 used of 1 guaranteed" in text(browser, "teams-rows"))
    shown = text(browser, "teams-rows")
    assert "1 with nodes, 0 waiting" in shown
    assert "would borrow; highest waiting priority 3" in shown
    assert HOSTILE in shown
    visit(browser, named, "jobs/two")
    eventually(lambda: "place 1 of 1: no group" in text(browser, "job-place"))
    assert HOSTILE in text(browser, "job-spec")
    assert "queued" in text(browser, "job-tiles")
    link.until_answered("POST", "/v1/jobs/one/end", {}, "end")
    eventually(lambda: "h20-00" in text(browser, "job-place"))
    assert "waits" not in text(browser, "job-place")
    assert browser.execute_script("return document.querySelectorAll('main img').length") == 0
    assert browser.title == "RollMux: two"
    assert complaints(browser) == []


def test_nodes_are_shown_with_what_is_wrong_with_them(named: Daemon, browser: Any) -> None:
    link = Link(named.port, named.token)
    two_jobs(link)
    body = {"status": "cordoned", "reason": HOSTILE}
    link.until_answered("POST", "/v1/nodes/h20-00/close", body, "close")
    less = {"name": "h800-00", "pool": "train", "devices": 4}
    assert link.until_answered("POST", "/v1/nodes", less, "agent")[1]["status"] == "set_aside"
    sign_in(browser, named)
    visit(browser, named, "nodes")
    eventually(lambda: "cordoned" in text(browser, "nodes-racks"))
    shown = text(browser, "nodes-racks")
    assert f"Rollout nodes, rack {HOSTILE}" in shown
    assert f"{HOSTILE}; no agent" in shown
    assert "set aside" in shown
    assert "its agent reports 4 devices, not 8; reported" in shown
    assert "150 of 1536 GB, 8 devices" in shown
    browser.execute_script("document.querySelector('#nodes-racks .card .name').click()")
    eventually(lambda: text(browser, "node-name") == "h20-00")
    assert "one" in text(browser, "node-jobs")
    assert HOSTILE in text(browser, "node-machine")
    visit(browser, named, "nodes/h20%2F..")
    eventually(lambda: "unknown" in text(browser, "node-tiles") or banner(browser))
    visit(browser, named, "jobs/none")
    eventually(lambda: "there is no job 'none'" in text(browser, "banner"))
    for none in ("main:not([hidden])", "main img"):
        assert browser.execute_script(f"return document.querySelector('{none}')") is None


def banner(browser: Any) -> bool:
    return not browser.execute_script("return document.getElementById('banner').hidden")


def test_every_view_is_reached_by_keyboard_and_fits_a_narrow_window_and_a_phone(
    named: Daemon, browser: Any
) -> None:
    two_jobs(Link(named.port, named.token))
    browser.set_window_size(1000, 800)
    sign_in(browser, named)
    body = browser.find_element("tag name", "body")
    reached = []
    for _ in range(5):
        body.send_keys("\ue004")
        reached.append(browser.execute_script("return document.activeElement.hash"))
    assert reached == ["#/", "#/", "#/queue", "#/teams", "#/nodes"]
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    label = "return document.querySelector('#node-gantt text').getBoundingClientRect().height"
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for view in ("", "queue", "teams", "nodes", "jobs/two", "jobs/one", "nodes/h20-00"):
        visit(browser, named, view)
        main = view.split("/")[0].removesuffix("s") if "/" in view else view or "cluster"
        seen = f"return document.getElementById('{main}').hidden"
        eventually(lambda seen=seen: browser.execute_script(seen) is False)
        assert browser.execute_script(wide) <= 0, view
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        assert browser.execute_script(wide) <= 0, f"{view} on a phone"
        if view == "nodes/h20-00":
            eventually(lambda: browser.execute_script(label) > 10)
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


CHANGES = """
window.watch?.disconnect();
window.changes = 0;
window.watch = new MutationObserver((found) => {
  for (const each of found) changes += each.addedNodes.length + each.removedNodes.length;
});
window.watch.observe(document.body, { childList: true, subtree: true });
"""


@pytest.mark.slow
def test_a_thousand_jobs_are_not_drawn_anew_every_second(many: Daemon, browser: Any) -> None:
    """What changes on the page is what changed in the cluster, not all of it."""
    link = Link(many.port, many.token)
    spec = {"worst_rollout_s": 3600, "worst_train_s": 3600, "slo": 1000.0}
    spec |= {"rollout_memory_gb": 10.0, "train_memory_gb": 10.0}
    for number in range(1000):
        one = spec | {"id": f"job-{number:03d}"}
        assert link.until_answered("POST", "/v1/jobs", one, f"key-{number}")[0] == 201
    link.until_answered("POST", "/v1/nodes/h20-000/close", {"status": "cordoned"}, "close")
    sign_in(browser, many)
    views = {"": "#jobs tr", "nodes": "#nodes-racks .card", "queue": "#queue tr"}
    for view, made in views.items():
        visit(browser, many, view)
        many_made = f"return document.querySelectorAll('{made}').length > 100"
        eventually(lambda look=many_made: browser.execute_script(look))
        browser.execute_script(CHANGES)
        began = answers(browser)
        eventually(lambda began=began: answers(browser) > began + 2)
        assert browser.execute_script("return changes") < 500, view


def answers(browser: Any) -> int:
    names = "performance.getEntriesByType('resource').filter((e) => e.name.includes('/v1/status'))"
    return browser.execute_script(f"return {names}.length")
