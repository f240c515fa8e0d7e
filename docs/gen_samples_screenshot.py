"""Picture of the report's browser of responses: a short demo run, a headless Chromium.

python docs/gen_samples_screenshot.py [RUN] (needs selenium, chromium and chromedriver; without RUN
the demo's job is trained for 50 steps)
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from selenium import webdriver

from rollpacker.demo.run import Size, demo_config
from rollpacker.demo.warm_start import default_cache, warm_start
from rollpacker.job import train

IMAGE = Path(__file__).parent / "images" / "samples.png"


def shoot(page: Path) -> None:
    """The worst responses of the last step."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1240,900"):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    browser = webdriver.Chrome(options=options, service=service)
    try:
        browser.get(page.resolve().as_uri())
        browser.execute_script(
            "const s = document.querySelector(\"[aria-label='order of the responses']\");"
            "s.value = 'worst'; s.dispatchEvent(new Event('change'));"
            "document.querySelector('.response details').open = true;"
            "document.getElementById('responses').scrollIntoView();"
        )
        browser.save_screenshot(str(IMAGE))
    finally:
        browser.quit()


def main() -> None:
    """Write the picture."""
    if len(sys.argv) > 1:
        shoot(Path(sys.argv[1]) / "report.html")
        return
    with tempfile.TemporaryDirectory() as folder:
        size = Size(steps=50, held_out=200)
        model = warm_start(default_cache())
        shoot(train(demo_config(model, Path(folder) / "run", "exact", size)) / "report.html")


if __name__ == "__main__":
    main()
