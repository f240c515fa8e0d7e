"""What ``environment`` does: who answers the model, how long, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matrix_runs import Ran
from matrix_table import described, effect

CHATTING = Path(__file__).parents[1] / "chatting.py"
TALKING = Path(__file__).parents[2] / "runtime" / "support" / "talking.py"
CHAT = {
    "model.path": "{here}/bytes",
    "rollout.max_completion_length": 60,
    "environment.kind": "python",
    "environment.path": f"{CHATTING}:Chat",
    "environment.options": {"log": "{here}/{name}.said"},
}
UNTOLD = {"environment.options": {}}
ECHO = {"environment.path": f"{TALKING}:Echo"} | UNTOLD
TOOL = {"environment.kind": "tools", "environment.path": f"{CHATTING}:look_up"} | UNTOLD
"""Others, which note nothing."""

# --- a class that talks in two processes ---------------------------------------------------------

described(
    "talking",
    CHAT
    | {
        "environment.options": {"log": "{here}/{name}.said", "word": "again"},
        "environment.max_turns": 2,
        "environment.max_total_tokens": 200,
        "environment.concurrency": 3,
        "environment.processes": 2,
        "environment.reward": "last",
        "environment.weight": 0.5,
    },
)


def notes(ran: Ran, kind: str = "") -> list[dict[str, Any]]:
    """What the environments wrote, in order; of one kind or all."""
    log = ran.here / f"{ran.described.name}.said"
    assert log.exists()
    found = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return [note for note in found if kind in ("", note["kind"])]


def talks(ran: Ran) -> pl.DataFrame:
    """Responses that were trained on, with their turns."""
    assert "turn_tokens" in ran.kept.columns
    kept = ran.kept.filter(pl.col("turn_tokens").list.len() > 0)
    assert kept.height
    return kept.with_columns(
        turns=pl.col("turn_tokens").list.len(),
        whole=pl.col("turn_tokens").list.sum() + pl.col("added_tokens").list.sum(),
    )


@effect("environment.kind=python", run="talking", instead=TOOL)
@effect("environment.path", run="talking", instead=ECHO)
def _(ran: Ran) -> None:
    """It was given every reply that is complete."""
    assert len(notes(ran, "step")) >= (talks(ran)["turns"] - 1).sum() > 0


@effect(
    "environment.options",
    run="talking",
    instead={"environment.options": {"log": "{here}/{name}.said"}},
)
def _(ran: Ran) -> None:
    assert {note["word"] for note in notes(ran)} == {"again"}


@effect("environment.max_turns", run="talking")
def _(ran: Ran) -> None:
    assert talks(ran)["turns"].max() == 2


@effect("environment.max_total_tokens", run="talking")
def _(ran: Ran) -> None:
    """What was sampled is still no longer than it may be."""
    assert 60 < talks(ran)["whole"].max() <= 200
    assert talks(ran)["tokens"].max() <= 60


@effect("environment.concurrency", run="talking")
def _(ran: Ran) -> None:
    changes = {"reset": 1, "close": -1}
    held = np.cumsum([changes.get(note["kind"], 0) for note in notes(ran)])
    assert held.max() == 3


@effect("environment.processes", run="talking")
def _(ran: Ran) -> None:
    assert len({note["pid"] for note in notes(ran)}) == 2


@effect("environment.reward=last", run="talking")
def _(ran: Ran) -> None:
    """The second turn is worth 2, both are worth 3."""
    assert talks(ran)["rewards/environment"].max() == talks(ran)["turns"].max() > 1


@effect("environment.weight", run="talking")
def _(ran: Ran) -> None:
    given = talks(ran)["rewards/environment"].fill_null(0.0)
    assert given.max() > 0
    assert np.allclose(ran.kept["reward"], ran.kept["rewards/seen"] + 0.5 * given)


# --- one that raises, and one that hangs ---------------------------------------------------------

described(
    "scored",
    CHAT
    | {
        "environment.options": {"log": "{here}/{name}.said", "ill": "p2"},
        "environment.on_error": "score",
        "environment.failed_reward": -3.0,
    },
    slow=True,
)
described(
    "hanging",
    CHAT
    | {
        "environment.options": {"log": "{here}/{name}.said", "stuck": "p3"},
        "environment.step_timeout_s": 2.0,
        "rollout.max_retries": 0,
    },
    slow=True,
)


@effect("environment.on_error=score", run="scored")
def _(ran: Ran) -> None:
    """A response of one turn, which the environment did not answer, is trained on."""
    ill = talks(ran).filter(pl.col("prompt") == "p2")
    assert ill["turns"].to_list() == [1, 1, 1]


@effect("environment.failed_reward", run="scored")
def _(ran: Ran) -> None:
    ill = talks(ran).filter(pl.col("prompt") == "p2")
    assert ill["rewards/environment"].to_list() == [-3.0] * 3


@effect("environment.step_timeout_s", run="hanging")
def _(ran: Ran) -> None:
    assert "timed out after 2 s (environment.step_timeout_s)" in ran.said
    assert "p3" not in set(talks(ran)["prompt"])


LATE = {"environment.path": f"{CHATTING.parent / 'late.py'}:Chat"}
described("unloaded", CHAT | LATE | {"environment.start_timeout_s": 0.2}, refused=True)


@effect("environment.start_timeout_s", run="unloaded")
def _(ran: Ran) -> None:
    assert "did not start in 0.2 s (environment.start_timeout_s)" in ran.error
