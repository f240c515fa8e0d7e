"""What runs show of sampling, gradients, devices, rewards and environments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
from matrix_runs import Ran
from matrix_table import described, effect


def first_tokens(ran: Ran) -> dict[str, set[int]]:
    """What the responses of each prompt begin with."""
    found: dict[str, set[int]] = {}
    for call in ran.called("seen"):
        for prompt, ids in zip(call["prompts"], call["ids"], strict=True):
            found.setdefault(prompt, set()).add(ids[0])
    return found


@effect("deterministic", run="repeatable")
def _(ran: Ran) -> None:
    """Every step's gradients are summed at once, in the order in which prompts were started."""
    for step in ran.steps:
        tasks = [item for item in step if item["kind"] == "AccumulateGradients"]
        assert len(tasks) == 1
        order = [item["prompt"] for item in step if item["kind"] == "StartAttempt"]
        assert [part["prompt"] for part in tasks[0]["parts"]] == list(dict.fromkeys(order))


def finished_at_moves(ran: Ran) -> list[float]:
    """Share of the responses that were there when the tail moved, for each step where it did."""
    found: list[float] = []
    for number, step in enumerate(ran.steps):
        if moves := ran.places(number, "MigrateAttempts"):
            ends = [place for place in ran.places(number, "AttemptFinished") if place < moves[0]]
            found.append(len(ends) / sum(item["kind"] == "StartAttempt" for item in step))
    return found


def started(ran: Ran, step: int) -> Counter[str]:
    """Attempts of each prompt that a step began."""
    return Counter(item["prompt"] for item in ran.steps[step] if item["kind"] == "StartAttempt")


def kind_of(ran: Ran, step: int) -> dict[str, Any]:
    return next(item for item in ran.steps[step] if item["kind"] == "BeginRound")


def measured(ran: Ran) -> tuple[list[list[int]], int]:
    """Lengths of each audited prompt that the last checkpoint knows, and audits."""
    state = ran.state(len(ran.metrics))["policy"]["measure"]
    rounds = [each for each in state["history"]["rounds"] if each["source"] == "audit"]
    groups = [group for each in rounds for group in each["lengths"].values()]
    return groups, len(state["meter"]["audits"]["len"])


def alone(row: dict[str, Any]) -> int:
    """Tokens that were the only one of their sequence in a step."""
    return row["engine/generated_tokens"] - row["speculation/accepted"]


@effect("rollout.streaming.lookahead", run="scripted")
def _(ran: Ran) -> None:
    """Of ten times as many tasks, the worker holds so many at a time."""
    most = 0
    for step in ran.steps:
        flying = 0
        for item in step:
            flying += (item["kind"] == "AccumulateGradients") - (
                item["kind"] == "GradientsAccumulated"
            )
            most = max(most, flying)
    assert most == 5


def tasks(ran: Ran) -> list[set[tuple[float, float]]]:
    """When each worker summed gradients."""
    lines = (ran.folder / "workers.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[int, set[tuple[float, float]]] = {}
    for line in map(json.loads, lines):
        if line["kind"] == "accumulate":
            found.setdefault(line["worker"], set()).add((line["start_s"], line["end_s"]))
    return [found[worker] for worker in sorted(found)]


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


@effect("devices.kind=cuda", run="accelerated", instead={"devices.kind": "auto"})
def _(ran: Ran) -> None:
    """Where there is no GPU it is refused."""
    import torch

    if not torch.cuda.is_available():
        assert ran.error == "devices.kind is 'cuda' but no CUDA device was found"
    else:
        assert not ran.error


def who_trained(ran: Ran) -> set[tuple[int, str]]:
    """Numbers of what summed gradients, and what they are."""
    lines = (ran.folder / "workers.jsonl").read_text(encoding="utf-8").splitlines()
    return {(line["worker"], line.get("role", "both")) for line in map(json.loads, lines)}


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


LATE = {"environment.path": f"{CHATTING.parent / 'late.py'}:Chat"}
described("unloaded", CHAT | LATE | {"environment.start_timeout_s": 0.2}, refused=True)


def timeouts(ran: Ran) -> list[float]:
    """Mean timeout given in each step, seconds."""
    return [row.get("rewards/code/timeout_s", 0.0) for row in ran.metrics]


def total(ran: Ran, function: str) -> float:
    """Of the scores that a reward function gave."""
    return sum(sum(call["scores"]) for call in ran.called(function))
