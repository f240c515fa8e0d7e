"""Picture of one step in three modes: what each device does.

    python -m benchmarks.driver.emulated --gpus 16 --calibration paper-7b-8k --workload paper-8k \\
        --factor 10 --steps 1 --modes off exact race --out RUNS
    python docs/gen_modes_picture.py RUNS
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
