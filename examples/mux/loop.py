"""A job of one's own that asks RollMux for its phases: each only waits, in place of real work.

Agents start it (``program.yaml``). It keeps the number of finished iterations in a file, so that
it goes on there when it is started again, on whatever node.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rollpacker.rollmux.service.client import LeaseLostError, MuxClient, Phases, StateLostError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mux", nargs=3, required=True, metavar=("URL", "TOKEN_FILE", "CAFILE"))
    parser.add_argument("--job", required=True)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a phase")
    parser.add_argument("--kept", type=Path, required=True, help="file of what is done")
    given = parser.parse_args()
    url, token_file, cafile = given.mux
    client = MuxClient(url, token_file, cafile=cafile or None)
    mux = Phases(client, given.job)
    # An exception, so that a phase gives its nodes back; not 0, which would mean done.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    done = load(given.kept)
    # The daemon knows which phase comes next, also after a start in the middle of an iteration.
    while done < given.iterations and (phase := client.job(given.job)["next"]):
        try:
            with mux.phase(phase) as permit:
                print(f"iteration {done}: {phase} on {permit.nodes if permit else 'this machine'}")
                time.sleep(given.seconds)
                mux.check()  # a safe point: what follows is not to happen twice
                if phase == "train":
                    keep(given.kept, done + 1)
        except LeaseLostError as error:  # others may have the nodes: the same phase again
            print(f"iteration {done}: {error}")
        except StateLostError as error:  # a node has failed: back to what was kept
            print(f"iteration {done}: {error}")
            done = load(given.kept)
        else:
            done += phase == "train"


def keep(kept: Path, done: int) -> None:
    new = kept.with_name(f"{kept.name}.new")
    new.write_text(f"{done}")
    new.replace(kept)  # at once: a signal in between must not leave an empty file


def load(kept: Path) -> int:
    return int(kept.read_text()) if kept.exists() else 0


if __name__ == "__main__":
    main()
