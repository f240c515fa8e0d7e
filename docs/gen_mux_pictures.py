"""Pictures of the dashboard for the documentation: a daemon with named nodes, two teams, jobs.

python docs/gen_mux_pictures.py (needs selenium, chromium and chromedriver)
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver

IMAGES = Path(__file__).parent / "images"
SERVE = "from rollpacker.cli import main; main()"
SECONDS = 60.0
INVENTORY: dict[str, Any] = {
    "nodes": [
        {"name": "h20-[00-02]", "pool": "rollout", "rack": "a"},
        {"name": "h20-[03-05]", "pool": "rollout", "rack": "b"},
        {"name": "h800-[00-05]", "pool": "train", "rack": "c", "labels": {"nvlink": "yes"}},
    ],
    "teams": [
        {"name": "math", "rollout": 3, "train": 3},
        {"name": "code", "rollout": 2, "train": 2},
    ],
}
NODES = [f"h20-{n:02d}" for n in range(6)] + [f"h800-{n:02d}" for n in range(6)]
JOBS = (
    ("math-7b", "math", 1),
    ("code-14b", "code", 1),
    ("math-32b", "math", 2),
    ("agent-8b", "", 1),
    ("code-7b", "code", 1),
    ("judge-7b", "math", 1),
    ("proofs-14b", "math", 1),
    ("chat-8b", "", 1),
    ("code-32b", "code", 2),
    ("tests-7b", "code", 1),
    ("math-70b", "math", 3),
    ("tools-14b", "", 2),
)
VIEWS = {"cluster": "", "queue": "queue", "teams": "teams", "nodes": "nodes", "job": "jobs/math-7b"}


def call(url: str, token: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A POST; an empty answer is an empty object."""
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": uuid.uuid4().hex}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.loads(answer.read() or b"{}")


def submit(url: str, token: str, name: str, team: str, nodes: int) -> None:
    """A job whose phases take seconds in place of minutes."""
    gangs = {"rollout_nodes": nodes, "train_nodes": nodes, "team": team, "priority": nodes % 2}
    worst = {"worst_rollout_s": 6.0, "worst_train_s": 4.0, "slo": 1.6, "iterations": 90}
    call(url, token, "/v1/jobs", {"id": name} | worst | gangs)


def run_job(url: str, token: str, name: str, rng: random.Random, until: float) -> None:
    """Its phases, as soon as it has nodes."""
    phase = "rollout"
    while time.monotonic() < until and phase:
        asked = {"phase": phase, "wait_s": 20}
        permit = call(url, token, f"/v1/jobs/{name}/permits", asked)
        if "move" in permit:
            call(url, token, f"/v1/jobs/{name}/moved", {"move": permit["move"]["id"]})
            continue
        if not permit:
            continue
        seconds = rng.uniform(0.6, 1.0) * (4.0 if phase == "rollout" else 2.5)
        time.sleep(seconds)
        done = call(url, token, f"/v1/permits/{permit['token']}/finish", {"seconds": seconds})
        phase = done["next"]


def report(url: str, token: str, until: float) -> None:
    """The agents of all nodes."""
    while time.monotonic() < until:
        for node in NODES:
            call(url, token, f"/v1/nodes/{node}/heartbeat", {})
        time.sleep(5.0)


def shoot(url: str, token: str) -> None:
    """One picture of each view, as high as the view is."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1240,1000"):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    try:
        browser.get(f"{url}/#token={token}")
        browser.execute_script(
            "const s = document.getElementById('window'); s.value = '60';"
            "s.dispatchEvent(new Event('change'));"
        )
        for name, view in VIEWS.items():
            browser.execute_script(f"location.hash = '#/{view}'")
            time.sleep(2.5)
            high = "return Math.ceil(document.body.getBoundingClientRect().bottom) + 10"
            browser.set_window_size(1240, min(browser.execute_script(high) + 140, 1140))
            time.sleep(1.0)
            browser.save_screenshot(str(IMAGES / f"mux_{name}.png"))
    finally:
        browser.quit()


def until_gone(work: Callable[..., None], *args: Any) -> threading.Thread:
    """A worker that stops where the daemon does."""

    def run() -> None:
        with contextlib.suppress(OSError):
            work(*args)

    return threading.Thread(target=run, daemon=True)


def fill(url: str, token: str) -> None:
    """Submit the jobs, close a node, let phases run."""
    until = time.monotonic() + SECONDS + 40.0
    workers = [until_gone(report, url, token, until)]
    for number, (name, team, nodes) in enumerate(JOBS):
        submit(url, token, name, team, nodes)
        rng = random.Random(number)
        workers.append(until_gone(run_job, url, token, name, rng, until))
    closed = {"status": "cordoned", "reason": "new cables on Thursday"}
    call(url, token, "/v1/nodes/h20-05/close", closed)
    for worker in workers:
        worker.start()
    time.sleep(SECONDS)


def main() -> None:
    """Write all pictures."""
    IMAGES.mkdir(exist_ok=True)
    settings = json.dumps({"warm_s": 0.1, "cold_s": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "nodes.yaml"
        inventory.write_text(json.dumps(INVENTORY))
        command = [sys.executable, "-c", SERVE, "mux", "serve", "--state", folder, "--port", "0"]
        more = ["--inventory", str(inventory), "--settings", settings]
        daemon = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, text=True)
        assert daemon.stdout is not None
        url = daemon.stdout.readline().split()[2].rstrip(",")
        token = (Path(folder) / "token").read_text().strip()
        fill(url, token)
        shoot(url, token)
        daemon.kill()
        daemon.wait()


if __name__ == "__main__":
    main()
