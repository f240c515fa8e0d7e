"""How long the dashboard takes with many jobs and nodes, in a headless Chromium.

    python -m benchmarks.mux.dashboard --jobs 1000 --nodes 200

A real daemon; jobs are submitted, most get nodes, the others wait. For every view: milliseconds of
drawing it for the first time and again, and from asking the daemon until its answer is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from selenium import webdriver

from benchmarks._run import daemon, flags

VIEWS = ("", "queue", "teams", "nodes", "jobs/job-0", "nodes/h20-000")
SPEC = {"worst_rollout_s": 3600, "worst_train_s": 3600, "slo": 1000.0}
MEMORY = {"rollout_memory_gb": 10.0, "train_memory_gb": 10.0}
TIMES = """
const shown = performance.getEntriesByName('show').at(-1);
const asked = performance.getEntriesByType('resource').filter((each) => each.name.includes('/v1/'));
return [shown ? shown.startTime : 0, shown ? shown.duration : 0, asked.at(-1)?.duration ?? 0];
"""


def submit(url: str, token: str, number: int) -> None:
    body = SPEC | MEMORY | {"id": f"job-{number}", "team": ("math", "code")[number % 2]}
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": f"key-{number}"}
    request = urllib.request.Request(f"{url}/v1/jobs", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=90).close()


def open_browser() -> Any:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1240,1000"):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


def measure(browser: Any, view: str, rounds: int) -> list[tuple[float, float]]:
    """Milliseconds of drawing, and of the answer, of each round."""
    found: list[tuple[float, float]] = []
    last = browser.execute_script(TIMES)[0]
    browser.execute_script(f"location.hash = '#/{view}'")
    while len(found) < rounds:
        start, took, asked = browser.execute_script(TIMES)
        if start != last:
            found.append((took, asked))
            last = start
        time.sleep(0.05)
    return found


def main() -> None:
    args = flags(
        __doc__, jobs=1000, nodes=(200, "18 at least"), rounds=(6, "2 at least")
    ).parse_args()
    last = args.nodes // 2 - 1
    with tempfile.TemporaryDirectory() as folder:
        nodes = [
            {"name": f"h20-[000-{last:03d}]", "pool": "rollout"},
            {"name": f"h800-[000-{last:03d}]", "pool": "train"},
        ]
        inventory = Path(folder) / "nodes.yaml"
        teams = [{"name": "math", "rollout": 9}]
        inventory.write_text(json.dumps({"nodes": nodes, "teams": teams}))
        words = ("--state", folder, "--port", "0", "--inventory", str(inventory))
        with daemon(*words) as url:
            report(args, url, (Path(folder) / "token").read_text().strip())


def report(args: argparse.Namespace, url: str, token: str) -> None:
    """Submit, and print a row for each view."""
    for number in range(args.jobs):
        submit(url, token, number)
    browser = open_browser()
    browser.get(f"{url}/#token={token}")
    print("view, first ms, again ms (median, most), answer ms (median)")
    for view in VIEWS:
        first, *again = measure(browser, view, args.rounds)
        drawn, asked = [took for took, _ in again], [took for _, took in again]
        print(
            f"{view or 'cluster'}, {first[0]:.0f}, {statistics.median(drawn):.1f}, "
            f"{max(drawn):.1f}, {statistics.median(asked):.0f}"
        )
    browser.quit()


if __name__ == "__main__":
    main()
