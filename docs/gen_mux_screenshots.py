"""Pictures of the dashboard for the documentation: a daemon, five jobs, a headless Chromium.

python docs/gen_mux_screenshots.py (needs selenium, chromium and chromedriver)
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any

from selenium import webdriver

IMAGES = Path(__file__).parent / "images"
SERVE = "from rollpacker.cli import main; main()"
SECONDS = 45.0


def call(url: str, token: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """A POST; an empty answer is an empty object."""
    headers = {"Authorization": f"Bearer {token}", "Idempotency-Key": uuid.uuid4().hex}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=90) as answer:
        return json.loads(answer.read() or b"{}")


def run_job(url: str, token: str, name: str, rng: random.Random, until: float) -> None:
    """Phases of some seconds in place of minutes."""
    worst = {"worst_rollout_s": 6.0, "worst_train_s": 3.0, "slo": 3.0, "iterations": 60}
    call(url, token, "/v1/jobs", {"id": name} | worst)
    phase = "rollout"
    while time.monotonic() < until:
        asked = {"phase": phase, "wait_s": 60}
        permit = call(url, token, f"/v1/jobs/{name}/permits", asked)
        if "move" in permit:
            call(url, token, f"/v1/jobs/{name}/moved", {"move": permit["move"]["id"]})
            continue
        if not permit:
            continue
        seconds = rng.uniform(0.5, 1.0) * (2.5 if phase == "rollout" else 1.2)
        time.sleep(seconds)
        done = call(url, token, f"/v1/permits/{permit['token']}/finish", {"seconds": seconds})
        phase = done["next"]


def shoot(url: str, token: str) -> None:
    """The cluster and one job."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1240,1000"):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    try:
        for name, path in (("cluster", f"/#token={token}"), ("job", "/#/job/math-7b")):
            browser.get(url + path)
            browser.execute_script(
                "const s = document.getElementById('window'); s.value = '60';"
                "s.dispatchEvent(new Event('change'));"
            )
            time.sleep(2.5)
            browser.save_screenshot(str(IMAGES / f"mux_{name}.png"))
    finally:
        browser.quit()


def main() -> None:
    """Write both pictures."""
    IMAGES.mkdir(exist_ok=True)
    settings = json.dumps({"warm_s": 0.1, "cold_s": 0.5})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", SERVE, "mux", "serve", "--state", folder, "--port", "0"]
        daemon = subprocess.Popen(
            [*command, "--settings", settings], stdout=subprocess.PIPE, text=True
        )
        assert daemon.stdout is not None
        url = daemon.stdout.readline().split()[2].rstrip(",")
        token = (Path(folder) / "token").read_text().strip()
        until = time.monotonic() + SECONDS + 15.0
        for number, name in enumerate(("math-7b", "code-14b", "agent-8b", "judge-7b", "chat-8b")):
            args = (url, token, name, random.Random(number), until)
            threading.Thread(target=run_job, args=args, daemon=True).start()
            time.sleep(1.0)
        time.sleep(SECONDS)
        shoot(url, token)
        daemon.terminate()
        daemon.wait()


if __name__ == "__main__":
    main()
