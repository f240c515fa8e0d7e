"""What ``engine`` does, and how gradient work is cut for the workers."""

from __future__ import annotations

import json
from typing import Any

from matrix_runs import Ran
from matrix_table import described, effect

# --- the engine ----------------------------------------------------------------------------------


def alone(row: dict[str, Any]) -> int:
    """Tokens that were the only one of their sequence in a step."""
    return row["engine/generated_tokens"] - row["speculation/accepted"]


@effect("engine[mini].max_running", run="chat")
def _(ran: Ran) -> None:
    for row in ran.metrics:
        assert alone(row) <= 2 * row["engine/steps"]


@effect("engine[mini].kv_tokens", run="procedural")
def _(ran: Ran) -> None:
    """The budget is that of one long prompt and its response: few run at a time."""
    for row in ran.metrics:
        assert alone(row) <= 3 * row["engine/steps"]


described("blocks", {"engine.block_size": 32}, slow=True, refused=True)


@effect("engine[mini].block_size", run="blocks")
def _(ran: Ran) -> None:
    """The kernels for CPUs have one size; another one is refused."""
    assert ran.error == "engine.block_size=32: on a CPU a block has 16 tokens; leave it out"


described("elsewhere", {"engine.kind": "vllm"}, refused=True)


@effect("engine.kind=vllm", run="elsewhere")
def _(ran: Ran) -> None:
    """Where vLLM is not installed it is refused; where it is, see ``make test-cluster``."""
    assert ran.error.startswith("engine.kind=vllm: vLLM cannot be imported")


described(
    "scripted",
    {
        "engine.kind": "fake",
        "engine.lengths": [200],
        "rewards.0.options": {"broken": "003", "hangs": "005"},
        "rewards.0.timeout_s": 1.5,
        "grading.retries": 0,
        "rollout.max_completion_length": 210,
        "rollout.max_retries": 1,
        "rollout.streaming.enabled": False,
        "rollout.streaming.lookahead": 5,
        "rollout.streaming.group_tokens": 1,
    },
)


@effect("engine.kind=fake", run="scripted", instead={"engine.lengths": None})
def _(ran: Ran) -> None:
    """Its tokens are among the first sixteen, and it says nothing else."""
    assert set(ran.table["finish_reason"]) == {"stop"}
    assert {token for call in ran.calls for ids in call["ids"] for token in ids} == set(range(16))


@effect("engine[fake].lengths", run="scripted")
def _(ran: Ran) -> None:
    assert set(ran.table["tokens"]) == {200}


# --- gradients -----------------------------------------------------------------------------------


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


@effect("rollout.streaming.group_tokens", run="scripted")
def _(ran: Ran) -> None:
    """No task has more than one response."""
    for item in (item for step in ran.steps for item in step):
        if item["kind"] == "AccumulateGradients":
            assert sum(part["stop"] - part["start"] for part in item["parts"]) == 1


# --- the trainer ---------------------------------------------------------------------------------

SPREAD = {"devices.per_node": 2, "trainer.kind": "fsdp"}
described("spread", SPREAD)
described("unshared", SPREAD | {"trainer.shard": 1}, slow=True)


def tasks(ran: Ran) -> list[set[tuple[float, float]]]:
    """When each worker summed gradients."""
    lines = (ran.folder / "workers.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[int, set[tuple[float, float]]] = {}
    for line in map(json.loads, lines):
        if line["kind"] == "accumulate":
            found.setdefault(line["worker"], set()).add((line["start_s"], line["end_s"]))
    return [found[worker] for worker in sorted(found)]


@effect("trainer.kind=fsdp", run="spread", against="pair")
def _(ran: Ran) -> None:
    """The workers of a replica sum the same gradients at the same time."""
    one, other = tasks(ran)
    assert one == other


@effect("trainer[fsdp].shard", run="unshared", against="spread")
def _(ran: Ran) -> None:
    """Each worker is a replica, with gradients of its own."""
    one, other = tasks(ran)
    assert not one & other
