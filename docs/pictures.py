"""Pictures of the documentation, of emulated runs, of a demo and of a daemon.

    python docs/pictures.py modes                      # one step in two modes, in four minutes
    rollpacker demo --out runs/demo
    python docs/pictures.py report runs/demo           # its report, and the browser of responses
    python docs/pictures.py mux                        # the dashboard: named nodes, two teams, jobs

The last two need selenium, chromium and chromedriver, and the demo a machine to itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"
FACTOR = 4.0
"""Emulated seconds in one of the clock's: so few that other programs may be at work."""
TITLES = {
    "off": "off: devices wait for the longest response",
    "exact": "exact: idle devices compute gradients",
}
LEFT, RIGHT, ROW, LEVELS = 20, 800, 7, 8
"""Pixels where the longest step begins and ends, and of a device; shades of its decoding."""
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 414" width="900" height="414" role="img" \
aria-label="{title}"
font-family="system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif" font-size="25">
<style>
svg {{ --card: #fff; --ink: #1f2328; --edge: #d1d9e0;
  --decode: #0969da; --idle: #ffd257; --gradients: #3fb468; --update: #c4cbd3 }}
@media (prefers-color-scheme: dark) {{ svg {{ --card: #0d1117; --ink: #f0f6fc; --edge: #3d444d;
  --decode: #4493f8; --idle: #9a6b00; --gradients: #23843f; --update: #4b535d }} }}
text {{ fill: var(--ink); stroke: var(--card); stroke-width: 4px; paint-order: stroke }}
</style>
<rect x="1" y="1" width="898" height="412" rx="8" fill="var(--card)" stroke="var(--edge)"/>
<text x="20" y="42" font-size="30" font-weight="700">{title}</text>
{bands}
<text x="20" y="400">Each row is a device, bluer while it decodes more responses.</text>
</svg>
"""
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


def modes() -> None:
    """One step on emulated devices in each mode."""
    from rollpacker.demo.cluster import SETTING, run_cluster
    from rollpacker.report.drawing.gantt_data import Gantt
    from rollpacker.report.reading.run_folder import load_run
    from rollpacker.runtime.record.progress import Progress

    with tempfile.TemporaryDirectory() as folder:
        runs = run_cluster(Path(folder), list(TITLES), Progress(), replace(SETTING, factor=FACTOR))
        if not all(run["honest"] for run in runs.values()):
            sys.exit("too busy a machine: lower FACTOR, or repeat with nothing else at work")
        gantts = {mode: Gantt(load_run(Path(run["run"]))) for mode, run in runs.items()}
        charts = {mode: gantt.chart(max(gantt.windows)) for mode, gantt in gantts.items()}
    (IMAGES / "modes.svg").write_text(picture(charts), encoding="utf-8")


def picture(charts: Mapping[str, Mapping[str, Any]]) -> str:
    """A step of each mode on one axis of time, the slowest first."""
    slow, fast = (chart["end"] for chart in charts.values())
    bands = "\n".join(
        line
        for y, (mode, chart) in zip((78, 242), charts.items(), strict=True)
        for line in band(TITLES[mode], chart, y, (RIGHT - LEFT) / slow)
    )
    return SVG.format(
        title=f"{slow / fast:.2f}x as fast as off, with the same samples", bands=bands
    )


def band(title: str, chart: Mapping[str, Any], y: float, scale: float) -> Iterator[str]:
    """One step: a row for each device, those that decode longest last."""
    workers = sorted(chart["workers"], key=lambda worker: max(row[2] for row in worker["attempts"]))
    most = max(worker["lanes"] for worker in workers)
    bars = [
        (kind, shade, LEFT + scale * start, y + 12 + ROW * row, scale * (end - start))
        for row, worker in enumerate(workers)
        for kind, shade, start, end in doings(worker, chart["end"], most)
    ]
    yield f'<text x="{LEFT}" y="{y}">{title}</text>'
    for kind, shade in sorted({bar[:2] for bar in bars}, key=lambda of: of[0] == "idle"):
        path = "".join(
            f"M{x:.1f} {top:.0f}h{width:.1f}v{ROW}h{-width:.1f}z"
            for *of, x, top, width in bars
            if of == [kind, shade]
        )
        yield f'<path fill="var(--{kind})" fill-opacity="{shade:.2f}" d="{path}"/>'
    for kind in ("decode", "idle", "gradients", "update"):
        own = [bar[2:] for bar in bars if bar[0] == kind]
        area = sum(width for *_, width in own)
        if area > 60 * len(workers):
            x = sum(width * (x + width / 2) for x, _, width in own) / area
            top = sum(width * top for _, top, width in own) / area
            yield f'<text x="{x:.0f}" y="{top + 12:.0f}" text-anchor="middle">{kind}</text>'
    end = LEFT + scale * chart["end"] + 8
    yield f'<text x="{end:.0f}" y="{y + 77}" font-weight="700">{chart["end"]:.0f} s</text>'


def doings(
    worker: Mapping[str, Any], end: float, most: int
) -> Iterator[tuple[str, float, float, float]]:
    """A device's work, its shade, and its seconds."""
    changes: Counter[float] = Counter()
    for _, start, stop, *_ in worker["attempts"]:
        changes[start] += 1
        changes[stop] -= 1
    times = sorted(changes)
    held = accumulate(changes[at] for at in times)
    shades = [math.ceil(LEVELS * responses / most) / LEVELS for responses in held]
    cuts = [0, *(i for i in range(1, len(times)) if shades[i] != shades[i - 1])]
    for first, last in pairwise(cuts):
        if shades[first]:
            yield "decode", shades[first], times[first], times[last]
    begins = {kind: start for _, start, _, kind, _ in reversed(worker["tasks"])}
    updates = begins["apply"]
    yield "gradients", 1.0, begins["accumulate"], updates
    yield "update", 1.0, updates, end
    for start, stop in worker["idle"]:
        if start < updates and stop - start > end / 200:
            yield "idle", 1.0, start, stop


def report(demo: Path) -> None:
    """The demo's report, and the worst responses of a run."""
    with browser(1200, 2060) as page:
        page.get((demo / "report.html").resolve().as_uri())
        page.save_screenshot(str(IMAGES / "report.png"))
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
        case ["modes"]:
            modes()
        case ["report", demo]:
            report(Path(demo))
        case ["mux"]:
            mux()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
