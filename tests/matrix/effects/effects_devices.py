"""What ``devices`` and ``cluster`` do."""

from __future__ import annotations

import json
import os
from typing import Any

from matrix_runs import Ran
from matrix_table import described, effect

# --- devices -------------------------------------------------------------------------------------

PROBED = {"rewards.0.options": {"probe": True}, "steps": 1}
described("pinned", PROBED | {"devices.pin": True}, slow=True)
described("loose", PROBED | {"devices.pin": False}, slow=True)
described("wide", PROBED | {"devices.pin": True, "devices.threads": 2}, slow=True)
described("accelerated", {"devices.kind": "cuda"}, slow=True, refused=True)
described("crowded", {"devices.per_gpu": 2}, slow=True, refused=True)
FROZEN = {"devices.per_node": 2, "rewards.0.options": {"freezes": "003"}}
described("frozen", FROZEN | {"cluster.heartbeat_s": 1.0}, slow=True)


def cores(ran: Ran) -> set[int]:
    """How many cores the worker may use, at each call of the reward."""
    assert ran.calls
    return {len(cores_of(call)) for call in ran.calls}


def cores_of(call: dict[str, Any]) -> list[int]:
    """Of the first worker."""
    assert "workers" in call
    found: list[int] = []
    for part in call["workers"][0]["Cpus_allowed_list"].split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


@effect("devices.pin", run="loose", against="pinned", instead={"devices.pin": True})
def _(ran: Ran) -> None:
    assert cores(ran) == {len(os.sched_getaffinity(0))}


@effect("devices.threads", run="wide", against="pinned")
def _(ran: Ran) -> None:
    """Each worker has that many cores for its own."""
    assert cores(ran) == {2}


@effect("cluster.heartbeat_s", run="frozen")
def _(ran: Ran) -> None:
    assert "worker 1 died: it gave no sign of life" in ran.said
    assert ran.silence < 10  # at least 20 by default


@effect("devices.kind=cuda", run="accelerated", instead={"devices.kind": "auto"})
def _(ran: Ran) -> None:
    """Where there is no GPU it is refused."""
    import torch

    if not torch.cuda.is_available():
        assert ran.error == "devices.kind is 'cuda' but no CUDA device was found"
    else:
        assert not ran.error


@effect("devices.per_gpu", run="crowded")
def _(ran: Ran) -> None:
    """On a CPU it is refused; tests marked ``gpu`` run it."""
    assert ran.error == "devices.per_gpu is 2 but the run is on the CPU: use devices.per_node"


# --- layouts -------------------------------------------------------------------------------------

described("divided", {"devices.per_node": 3, "devices.layout": "separate", "devices.training": 2})


def who_trained(ran: Ran) -> set[tuple[int, str]]:
    """Numbers of what summed gradients, and what they are."""
    lines = (ran.folder / "workers.jsonl").read_text(encoding="utf-8").splitlines()
    return {(line["worker"], line.get("role", "both")) for line in map(json.loads, lines)}


@effect("devices.layout=separate", run="divided", instead={"devices.training": 0})
def _(ran: Ran) -> None:
    """What trains does not decode."""
    assert {role for _, role in who_trained(ran)} == {"replica"}


@effect("devices.training", run="divided", instead={"devices.training": 1})
def _(ran: Ran) -> None:
    """One device of three decodes."""
    assert who_trained(ran) == {(0, "replica"), (1, "replica")}
    assert set(ran.table["worker"]) == {0}
