"""What other processes took of the cores."""

import subprocess
import sys
import time
from pathlib import Path

import psutil

from rollpacker.demo.contention import Contention, warning
from rollpacker.report.compare import NOISY


def write(path: Path, busy_ticks: int) -> None:
    """Of two cores, by the kernel's format; idle and waiting time count for nothing."""
    path.write_text(
        f"cpu  {busy_ticks} 0 0 500000 9999 0 0 0 0 0\ncpu0 1 0 0 0\ncpu1 1 0 0 0\nintr 5\n"
    )


def test_the_time_of_others_is_a_share_of_all_cores(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    write(stat, 1_000_000)
    began = time.monotonic()
    contention = Contention(stat)
    while time.monotonic() < began + 0.2:
        pass  # our own time, which is not the others'
    write(stat, 1_000_000)
    assert contention.share() == 0.0
    write(stat, 1_000_000 + 10_000)  # 100 s
    assert contention.share() > 1.0


def test_what_runs_below_a_child_is_ours(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    write(stat, 1_000_000)
    contention = Contention(stat)
    below = subprocess.Popen([sys.executable, "-c", BELOW], stdin=subprocess.PIPE)
    while sum(psutil.Process(below.pid).cpu_times()[2:4]) < 0.4:
        time.sleep(0.02)
    write(stat, 1_000_000 + 40)  # 0.4 s
    assert contention.share() == 0.0
    below.communicate(b"\n")


BELOW = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.5: pass"])
input()
"""


def test_without_the_kernels_count_nothing_is_said(tmp_path: Path) -> None:
    assert Contention(tmp_path / "none").share() == 0.0
    assert warning(0.0) is None
    assert warning(NOISY - 0.01) is None
    assert "took 40% of the cores" in str(warning(0.4))
