"""Pictures of the documentation, of a demo that had the machine to itself and of a daemon.

    rollpacker demo --out runs/demo
    python docs/pictures.py report runs/demo           # its report, and the browser of responses
    python docs/pictures.py mux                        # the dashboard: named nodes, two teams, jobs

They need selenium, chromium and chromedriver. The report shows one step in three modes first.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
WORST = (
    "const s = document.querySelector(\"[aria-label='order of the responses']\");"
    "s.value = 'worst'; s.dispatchEvent(new Event('change'));"
    "document.querySelector('.response details').open = true;"
    "document.getElementById('responses').scrollIntoView();"
)
"""The worst responses of the last step."""
LAST_MINUTE = (
    "const s = document.getElementById('window'); s.value = '60';"
    "s.dispatchEvent(new Event('change'));"
)
SECONDS = 60.0
"""In which the daemon's jobs run before it is drawn."""
SERVE = (sys.executable, "-c", "from rollpacker.cli import main; main()", "mux", "serve")
SETTINGS = json.dumps({"warm_s": 0.1, "cold_s": 0.5})
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
NODES = [f"{kind}-{n:02d}" for kind in ("h20", "h800") for n in range(6)]
JOBS = (
    *(("math-7b", "math", 1), ("code-14b", "code", 1), ("math-32b", "math", 2)),
    *(("agent-8b", "", 1), ("code-7b", "code", 1), ("judge-7b", "math", 1)),
    *(("proofs-14b", "math", 1), ("chat-8b", "", 1), ("code-32b", "code", 2)),
    *(("tests-7b", "code", 1), ("math-70b", "math", 3), ("tools-14b", "", 2)),
)
"""Names, teams, and nodes of either pool."""
VIEWS = {"cluster": "", "queue": "queue", "teams": "teams", "nodes": "nodes", "job": "jobs/math-7b"}


@contextlib.contextmanager
def browser(width: int, height: int) -> Iterator[Any]:
    """A headless Chromium with a window of that many pixels."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    size = f"--window-size={width},{height}"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", size):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    opened = webdriver.Chrome(options=options, service=service)
    try:
        yield opened
    finally:
        opened.quit()


def report(demo: Path) -> None:
    """The demo's report, and the worst responses of a run."""
    with browser(1200, 1890) as page:
        page.get((demo / "report.html").resolve().as_uri())
        page.save_screenshot(str(IMAGES / "report.png"))
        page.find_element("id", "cluster").screenshot(str(IMAGES / "modes.png"))
    with browser(1240, 900) as page:
        page.get((demo / "exact" / "report.html").resolve().as_uri())
        page.execute_script(WORST)
        page.save_screenshot(str(IMAGES / "samples.png"))


class Daemon:
    """Clients of one daemon: jobs whose phases take seconds in place of minutes, and agents."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        self._token = token
        self._until = time.monotonic() + SECONDS + 40.0

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A POST; an empty answer is an empty object."""
        headers = {"Authorization": f"Bearer {self._token}", "Idempotency-Key": uuid.uuid4().hex}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=90) as answer:
            return json.loads(answer.read() or b"{}")

    def run_job(self, name: str, rng: random.Random) -> None:
        """Its phases, as soon as it has nodes."""
        phase = "rollout"
        while time.monotonic() < self._until and phase:
            permit = self.call(f"/v1/jobs/{name}/permits", {"phase": phase, "wait_s": 20})
            if "move" in permit:
                self.call(f"/v1/jobs/{name}/moved", {"move": permit["move"]["id"]})
                continue
            if not permit:
                continue
            seconds = rng.uniform(0.6, 1.0) * (4.0 if phase == "rollout" else 2.5)
            time.sleep(seconds)
            done = self.call(f"/v1/permits/{permit['token']}/finish", {"seconds": seconds})
            phase = done["next"]

    def report(self) -> None:
        """The agents of all nodes."""
        while time.monotonic() < self._until:
            for node in NODES:
                self.call(f"/v1/nodes/{node}/heartbeat", {})
            time.sleep(5.0)

    def fill(self) -> None:
        """Submit the jobs, close a node, let phases run."""
        workers = [_until_gone(self.report)]
        worst = {"worst_rollout_s": 6.0, "worst_train_s": 4.0, "slo": 1.6, "iterations": 90}
        for number, (name, team, nodes) in enumerate(JOBS):
            gangs = {"rollout_nodes": nodes, "train_nodes": nodes}
            about = {"id": name, "team": team, "priority": nodes % 2}
            self.call("/v1/jobs", about | worst | gangs)
            workers.append(_until_gone(self.run_job, name, random.Random(number)))
        closed = {"status": "cordoned", "reason": "new cables on Thursday"}
        self.call("/v1/nodes/h20-05/close", closed)
        for worker in workers:
            worker.start()
        time.sleep(SECONDS)

    def draw(self) -> None:
        """One picture of each view, as high as the view is."""
        with browser(1240, 1000) as page:
            page.get(f"{self._url}/#token={self._token}")
            page.execute_script(LAST_MINUTE)
            for name, view in VIEWS.items():
                page.execute_script(f"location.hash = '#/{view}'")
                time.sleep(2.5)
                high = "return Math.ceil(document.body.getBoundingClientRect().bottom) + 10"
                page.set_window_size(1240, min(page.execute_script(high) + 140, 1140))
                time.sleep(1.0)
                page.save_screenshot(str(IMAGES / f"mux_{name}.png"))


def _until_gone(work: Callable[..., None], *args: Any) -> threading.Thread:
    """A worker that stops where the daemon does."""

    def run() -> None:
        with contextlib.suppress(OSError):
            work(*args)

    return threading.Thread(target=run, daemon=True)


def mux() -> None:
    """The dashboard of a daemon of its own."""
    with tempfile.TemporaryDirectory() as folder:
        inventory = Path(folder) / "nodes.yaml"
        inventory.write_text(json.dumps(INVENTORY))
        words = ("--state", folder, "--port", "0", "--inventory", str(inventory))
        command = [*SERVE, *words, "--settings", SETTINGS]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[2].rstrip(",")
            daemon = Daemon(url, (Path(folder) / "token").read_text().strip())
            daemon.fill()
            daemon.draw()
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Write the pictures that are named."""
    match sys.argv[1:]:
        case ["report", demo]:
            report(Path(demo))
        case ["mux"]:
            mux()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
