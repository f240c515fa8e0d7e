"""What ``rollout`` and ``engine`` do: how responses are sampled, which are kept, who waits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import polars as pl
from losses import expected_loss
from matrix_runs import Ran
from matrix_table import described, effect

# --- sampling, in the runs of other files --------------------------------------------------------


def first_tokens(ran: Ran) -> dict[str, set[int]]:
    """What the responses of each prompt begin with."""
    found: dict[str, set[int]] = {}
    for call in ran.called("seen"):
        for prompt, ids in zip(call["prompts"], call["ids"], strict=True):
            found.setdefault(prompt, set()).add(ids[0])
    return found


@effect("rollout.top_k", run="chat")
def _(ran: Ran) -> None:
    assert max(map(len, first_tokens(ran).values())) <= 2


@effect("rollout.top_p", run="procedural")
def _(ran: Ran) -> None:
    """The model knows 259 tokens, of nearly the same probability."""
    assert len(set().union(*first_tokens(ran).values())) <= 4


@effect("rollout.temperature", run="tuned")
def _(ran: Ran) -> None:
    """The softmax of a random model over 18 words is flat, and sharp when it is cold."""
    assert ran.metrics[0]["trained_tokens/entropy"] < 2.0


@effect("rollout.stop", run="gathered")
def _(ran: Ran) -> None:
    for call in ran.calls:
        assert all("1" not in text[:-1] for text in call["texts"])


@effect("rollout.prompts_per_step", run="chat")
def _(ran: Ran) -> None:
    assert all(len(ran.trained(step)) == 5 for step in range(len(ran.metrics)))


@effect("rollout.num_generations", run="chat")
def _(ran: Ran) -> None:
    groups = Counter(ran.kept.select("step", "prompt").rows())
    assert set(groups.values()) == {6}


@effect("rollout.max_completion_length", run="chat")
def _(ran: Ran) -> None:
    assert ran.table["tokens"].max() == 24


# --- gradients -----------------------------------------------------------------------------------

SLOW_GRADE = {
    "rewards.0.options": {"slow": "003"},
    "grading.workers": 2,
    "data.shuffle": False,
    "steps": 1,
}
described("unstreamed", SLOW_GRADE | {"rollout.streaming.enabled": False}, slow=True)
described("streamed", SLOW_GRADE, slow=True)


@effect("rollout.streaming.enabled", run="unstreamed", against="streamed")
def _(ran: Ran) -> None:
    """One reward takes a second; gradients of the other groups could start meanwhile."""
    assert ran.places(0, "FinishRollout")[0] < ran.places(0, "AccumulateGradients")[0]


described("repeatable", {"deterministic": True}, slow=True)


@effect("deterministic", run="repeatable")
def _(ran: Ran) -> None:
    """Every step's gradients are summed at once, in the order in which prompts were started."""
    for step in ran.steps:
        tasks = [item for item in step if item["kind"] == "AccumulateGradients"]
        assert len(tasks) == 1
        order = [item["prompt"] for item in step if item["kind"] == "StartAttempt"]
        assert [part["prompt"] for part in tasks[0]["parts"]] == list(dict.fromkeys(order))


# --- two workers ---------------------------------------------------------------------------------

PAIR = {"devices.per_node": 2, "epochs": 4, "rollout.streaming.group_tokens": 1}
described("pair", PAIR | {"rollout.streaming.consolidate_below": 100}, slow=True)
described("apart", PAIR | {"rollout.streaming.consolidate_below": 0}, slow=True)
late = {"rollout.streaming.scaling": "fixed", "rollout.streaming.scaling_fraction": 0.75}
described("halved", PAIR | late, slow=True)
described("early", PAIR | late | {"rollout.streaming.scaling_fraction": 0.1}, slow=True)
described("fitting", PAIR | {"rollout.streaming.scaling": "paper"}, slow=True)


@effect("devices.per_node", run="pair")
def _(ran: Ran) -> None:
    assert set(ran.table["worker"]) == {0, 1}
    assert ran.summary["workers"] == 2


@effect("rollout.streaming.consolidate_below", run="pair", against="apart")
def _(ran: Ran) -> None:
    assert sum(ran.count("MigrateAttempts")) > 0


def finished_at_moves(ran: Ran) -> list[float]:
    """Share of the responses that were there when the tail moved, for each step where it did."""
    found: list[float] = []
    for number, step in enumerate(ran.steps):
        if moves := ran.places(number, "MigrateAttempts"):
            ends = [place for place in ran.places(number, "AttemptFinished") if place < moves[0]]
            found.append(len(ends) / sum(item["kind"] == "StartAttempt" for item in step))
    return found


@effect("rollout.streaming.scaling=fixed", run="halved", against="apart")
def _(ran: Ran) -> None:
    assert finished_at_moves(ran)


@effect("rollout.streaming.scaling_fraction", run="halved", against="early")
def _(ran: Ran) -> None:
    assert finished_at_moves(ran)
    assert min(finished_at_moves(ran)) >= 0.75


@effect("rollout.streaming.scaling=paper", run="fitting", against="early")
def _(ran: Ran) -> None:
    """Between 20% and 50% of the responses."""
    assert finished_at_moves(ran)
    assert all(0.2 <= share <= 0.5 for share in finished_at_moves(ran))


# --- what becomes of the tail --------------------------------------------------------------------


def started(ran: Ran, step: int) -> Counter[str]:
    """Attempts of each prompt that a step began."""
    return Counter(item["prompt"] for item in ran.steps[step] if item["kind"] == "StartAttempt")


def kind_of(ran: Ran, step: int) -> dict[str, Any]:
    return next(item for item in ran.steps[step] if item["kind"] == "BeginRound")


described(
    "race",
    {
        "rollout.tail_batching.mode": "race",
        "rollout.tail_batching.eta_prompts": 1.75,
        "rollout.tail_batching.eta_responses": 2.0,
        "rollout.tail_batching.audit_every": 1,
        "rollout.tail_batching.audit_prompts": 2,
        "rollout.tail_batching.long_round_steps": 2,
        "data.path": "{here}/many.jsonl",
        "steps": 5,
    },
)


@effect("rollout.tail_batching.mode=race", run="race")
def _(ran: Ran) -> None:
    assert ran.metrics[0]["tail/round_kind"] == "short"
    assert max(started(ran, 0).values()) > 3
    assert set(Counter(ran.kept.select("step", "prompt").rows()).values()) == {3}


@effect("rollout.tail_batching.eta_prompts", run="race")
def _(ran: Ran) -> None:
    assert len(started(ran, 0)) == math.ceil(1.75 * 4)


@effect("rollout.tail_batching.eta_responses", run="race")
def _(ran: Ran) -> None:
    assert set(started(ran, 0).values()) == {2 * 3}


def meter(ran: Ran) -> dict[str, Any]:
    """What the last checkpoint knows of the run's bias."""
    return ran.state(len(ran.metrics))["policy"]["measure"]["meter"]


@effect("rollout.tail_batching.audit_every", run="race")
def _(ran: Ran) -> None:
    """Each short round but the first is one."""
    short = [row["tail/round_kind"] for row in ran.metrics[1:]].count("short")
    assert len(meter(ran)["latest"]) == short > 0


@effect("rollout.tail_batching.audit_prompts", run="race")
def _(ran: Ran) -> None:
    """All six responses of two prompts ran to their end, each time."""
    heard = sum(len(meter(ran)[name]["lengths"]) for name in ("old", "new"))
    assert heard == 2 * 6 * len(meter(ran)["latest"]) > 0


@effect("rollout.tail_batching.long_round_steps", run="race")
def _(ran: Ran) -> None:
    """A long round has the prompts of two steps, and an update for each half."""
    long = [n for n in range(len(ran.steps)) if kind_of(ran, n)["updates"] == 2]
    assert long
    for step in long:
        assert len(started(ran, step)) == 2 * 4
        assert ran.count("UpdateApplied")[step] == 2


described("plainly", {"rollout.tail_batching.mode": "off"}, slow=True)


@effect("rollout.tail_batching.mode=off", run="plainly")
def _(ran: Ran) -> None:
    """Sample, then grade, then train: each begins when the one before is over."""
    for step in range(len(ran.steps)):
        assert ran.places(step, "AttemptFinished")[-1] < ran.places(step, "GradeAttempt")[0]
        assert ran.places(step, "FinishRollout")[0] < ran.places(step, "AccumulateGradients")[0]


raced = {"rollout.tail_batching.mode": "prompts", "rollout.tail_batching.eta_prompts": 2.0}
described("prompts", raced | {"epochs": 2}, slow=True)
weighed = {"rollout.tail_batching.censoring_weights": True, "epochs": 2, "steps": 4}
described("weighed", raced | weighed, slow=True)


@effect("rollout.tail_batching.mode=prompts", run="prompts")
def _(ran: Ran) -> None:
    """Prompts race, their responses do not."""
    assert ran.metrics[0]["tail/round_kind"] == "short"
    assert len(started(ran, 0)) == 8
    assert set(started(ran, 0).values()) == {3}


@effect("rollout.tail_batching.censoring_weights", run="weighed", against="prompts")
def _(ran: Ran) -> None:
    """Where responses were aborted, the loss is not the mean over what was kept."""
    assert any(abs(row["loss"] - expected_loss(ran, row["step"])) > 1e-3 for row in ran.metrics)


# Of two likely tokens a prompt ends soon or never: lengths are a matter of the prompt.
described(
    "buckets",
    {
        "model.path": "{here}/bytes",
        "data.size": 8,
        "rollout.top_k": 2,
        "rollout.tail_batching.bucket_rounds": 2,
        "epochs": 2,
    },
    slow=True,
)


@effect("rollout.tail_batching.bucket_rounds", run="buckets")
def _(ran: Ran) -> None:
    """Eight prompts are drawn for two rounds of four: the shorter ones of last time together."""
    assert ran.count("DrawPrompts") == [1, 0, 1, 0]
    rows = ran.kept.filter(pl.col("step") < 2).group_by("prompt").agg(pl.col("tokens").mean())
    before = dict(rows.rows())
    rounds = [[before[prompt] for prompt in ran.trained(step)] for step in (2, 3)]
    rounds.sort(key=max)
    assert max(rounds[0]) <= min(rounds[1])


# Some responses take a hundred times as long as the others; a step of the engine takes a
# millisecond, whatever the machine, as far as predictions go.
CHOSEN = {
    "engine.kind": "fake",
    "engine.lengths": [2, 2, 2, 2, 2, 200],
    "rollout.max_completion_length": 210,
    "rollout.num_generations": 4,
    "rollout.prompts_per_step": 8,
    "rollout.tail_batching.mode": "auto",
    "rollout.tail_batching.eta_prompts": 2.0,
    "rollout.tail_batching.eta_responses": 2.0,
    "data.path": "{here}/many.jsonl",
    "steps": 13,
}
free = {"rollout.tail_batching.bias_limit": 0.1, "rollout.tail_batching.race_responses": True}
described("chosen", CHOSEN | free, slow=True)


@effect("rollout.tail_batching.mode=auto", run="chosen")
def _(ran: Ran) -> None:
    """At first nothing is known; then it is worth it."""
    kinds = [row["tail/round_kind"] for row in ran.metrics]
    assert kinds[0] == "full"
    assert "short" in kinds


@effect("rollout.tail_batching.race_responses", "rollout.tail_batching.bias_limit", run="chosen")
def _(ran: Ran) -> None:
    """It takes the race of responses, which bends lengths far below the usual limit."""
    assert max(max(started(ran, step).values()) for step in range(len(ran.steps))) > 4


# --- dynamic sampling ----------------------------------------------------------------------------

described(
    "drawn",
    {
        "rewards.0.options": {"flat": ["000", "001"]},
        "rollout.dynamic_sampling.enabled": True,
        "rollout.dynamic_sampling.max_draws": 1,
        "data.shuffle": False,
        "steps": 1,
    },
    slow=True,
)


@effect("rollout.dynamic_sampling.enabled", run="drawn")
def _(ran: Ran) -> None:
    """Two prompts teach nothing: they are dropped, and another one is drawn."""
    assert set(ran.table.filter(pl.col("state") == "dropped")["prompt"]) >= {"p0", "p1"}
    assert "p4" in set(ran.table["prompt"])
    assert ran.trained(0) <= {"p2", "p3", "p4"}


@effect("rollout.dynamic_sampling.max_draws", run="drawn")
def _(ran: Ran) -> None:
    """One for the step and one more, although two are missing."""
    assert ran.count("DrawPrompts") == [2]


described(
    "empty",
    {
        "rewards.0.options": {"flat": [f"{number:03d}" for number in range(99)]},
        "rollout.dynamic_sampling.enabled": True,
        "rollout.dynamic_sampling.max_empty_steps": 1,
        "steps": 2,
    },
    slow=True,
    refused=True,
)


@effect("rollout.dynamic_sampling.max_empty_steps", run="empty")
def _(ran: Ran) -> None:
    """The run stops at the first step that has nothing to train on."""
    assert len(ran.metrics) == 1
    assert "dynamic sampling has left a step without a group" in ran.error


# --- decoding ahead ------------------------------------------------------------------------------

LOOPING = {"rollout.temperature": 0.3, "rollout.max_completion_length": 60}
described("ahead", LOOPING, slow=True)
described("not-ahead", LOOPING | {"rollout.speculation.mode": "off"}, slow=True)


@effect("rollout.speculation.mode=off", run="not-ahead", against="ahead")
def _(ran: Ran) -> None:
    """Cold responses of a random model repeat themselves; nothing guesses how they go on."""
    assert sum(row["speculation/drafted"] for row in ran.metrics) == 0
