"""What the matrix holds: leaves, effects, runs and exceptions; with ``--run`` their seconds.

python tests/matrix/summary.py [--run] [--all]
"""

import argparse
import sys
import tempfile
from pathlib import Path

import conftest
from matrix_runs import Matrix
from matrix_table import ENTRIES, RUNS, happens
from matrix_tree import leaves
from matrix_whole import EXCEPTIONS

from rollpacker.config import RunConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="store_true", help="make the runs of the default suite")
    parser.add_argument("--all", action="store_true", help="with --run: the slow ones too")
    chosen = parser.parse_args()
    shown = {entry.leaf for entry in ENTRIES}
    quick = {entry.leaf for entry in ENTRIES if not entry.slow}
    runs = [run for run in RUNS.values() if chosen.all or not run.slow]
    print(f"{len(leaves(RunConfig))} leaves: {len(shown)} shown by a real run, ", end="")
    print(f"{len(quick)} of them in the default suite; {len(EXCEPTIONS)} exceptions")
    print(f"{len(RUNS)} runs, {sum(not run.slow for run in RUNS.values())} in the default suite")
    for leaf, reason in EXCEPTIONS.items():
        print(f"  {leaf}: {reason}")
    if chosen.run:
        with tempfile.TemporaryDirectory() as folder:
            make(Matrix(Path(folder) / "here", RUNS, conftest.prepare), runs)


def make(matrix: Matrix, runs: list) -> None:
    for run in runs:
        ran = matrix.get(run)
        mine = [entry for entry in ENTRIES if entry.run == run.name]
        seen = sum(happens(entry.holds, ran) for entry in mine)
        print(f"{run.name}: {ran.seconds:.1f} s, {seen} of {len(mine)} effects", flush=True)
    print(f"{sum(matrix.seconds.values()):.0f} s in all")


if __name__ == "__main__":
    sys.exit(main())
