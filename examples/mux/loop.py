"""A job of one's own that asks RollMux for its phases: each only waits, in place of real work.

Agents start it (``program.yaml``). It keeps the number of finished iterations in a file, so that
it goes on there when it is started again, on whatever node.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rollpacker.rollmux.service.client import MuxClient, Phases


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
    done = int(given.kept.read_text()) if given.kept.exists() else 0
    while done < given.iterations:
        with mux.phase("rollout") as permit:
            print(f"iteration {done}: rolls out on {permit.nodes if permit else 'this machine'}")
            time.sleep(given.seconds)
        with mux.phase("train") as permit:
            print(f"iteration {done}: trains on {permit.nodes if permit else 'this machine'}")
            time.sleep(given.seconds)
            mux.check()  # a safe point: what follows is not to happen twice
            done += 1
            given.kept.write_text(f"{done}")


if __name__ == "__main__":
    main()
