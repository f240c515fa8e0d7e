"""Picture of one step in three modes: what each device does.

It draws the runs of a demo that had the machine to itself:

    rollpacker demo --out RUNS
    python docs/gen_modes_picture.py RUNS/emulated
"""

from __future__ import annotations

import sys
from pathlib import Path

from rollpacker.report.drawing.gantt_data import Gantt
from rollpacker.report.drawing.step_picture import TITLES, step_picture
from rollpacker.report.reading.run_folder import load_run

IMAGE = Path(__file__).parent / "images" / "modes.svg"


def main() -> None:
    """Write the picture."""
    runs = {mode: Gantt(load_run(Path(sys.argv[1]) / mode)) for mode in TITLES}
    IMAGE.write_text(step_picture(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
