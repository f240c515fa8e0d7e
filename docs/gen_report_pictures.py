"""Pictures of the demo's report and of its browser of responses, by a headless Chromium.

    rollpacker demo --out runs/demo
    python docs/gen_report_pictures.py runs/demo

It needs selenium, chromium and chromedriver.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver

IMAGES = Path(__file__).parent / "images"
WORST = (
    "const s = document.querySelector(\"[aria-label='order of the responses']\");"
    "s.value = 'worst'; s.dispatchEvent(new Event('change'));"
    "document.querySelector('.response details').open = true;"
    "document.getElementById('responses').scrollIntoView();"
)
"""The worst responses of the last step."""


@contextmanager
def browser(width: int, height: int) -> Iterator[webdriver.Chrome]:
    """A headless Chromium with a window of that many pixels."""
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    opened = webdriver.Chrome(options=options, service=service)
    try:
        yield opened
    finally:
        opened.quit()


def main() -> None:
    """Write the pictures of the demo whose folder is the argument."""
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    demo = Path(sys.argv[1])
    with browser(1200, 1890) as page:
        page.get((demo / "report.html").resolve().as_uri())
        page.save_screenshot(str(IMAGES / "report.png"))
    with browser(1240, 900) as page:
        page.get((demo / "exact" / "report.html").resolve().as_uri())
        page.execute_script(WORST)
        page.save_screenshot(str(IMAGES / "samples.png"))


if __name__ == "__main__":
    main()
