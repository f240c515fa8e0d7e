"""What ``rewards`` and ``grading`` do: who is called with what, how often, and what it counts."""

from __future__ import annotations

import polars as pl
import pytest
from matrix_runs import Ran
from matrix_table import described, effect

# --- run ``chat`` of effects_data ----------------------------------------------------------------


@effect("rewards[].function", run="chat", instead={"rewards.0.function": "{here}/{name}.py:ones"})
def _(ran: Ran) -> None:
    assert ran.called("seen")
    assert ran.called("bonus")


@effect("rewards[].name", run="chat")
def _(ran: Ran) -> None:
    assert all("rewards/prize/mean" in row for row in ran.metrics)


@effect("rewards[].options", run="chat")
def _(ran: Ran) -> None:
    assert all(call["options"] == {"note": "hello"} for call in ran.called("seen"))


@effect("rewards[].needs_group", run="chat")
def _(ran: Ran) -> None:
    for call in ran.called("seen"):
        assert len(call["prompts"]) == 6
        assert len(set(call["prompts"])) == 1


@effect("rewards[].domains", run="chat")
def _(ran: Ran) -> None:
    prompts = {p for call in ran.called("bonus") for p in call["prompts"]}
    assert prompts
    assert all(int(prompt.strip("Q")) >= 8 for prompt in prompts)


@effect("rewards[].weight", run="chat")
def _(ran: Ran) -> None:
    scores = {f: sum(sum(c["scores"]) for c in ran.called(f)) for f in ("seen", "bonus")}
    assert scores["bonus"] > 0
    assert ran.table["reward"].sum() == pytest.approx(scores["seen"] + 2 * scores["bonus"])


# --- graded together, by two processes, when the round is over -----------------------------------

described(
    "gathered",
    {
        "epochs": 2,
        "rewards.0.batch": 5,
        "rewards.0.options": {"pause_s": 0.02},
        "grading.workers": 2,
        "grading.asynchronous": False,
        "rollout.stop": ["1"],
        "train.updates_per_step": 2,
    },
)


@effect("rewards[].batch", run="gathered")
def _(ran: Ran) -> None:
    assert max(len(call["prompts"]) for call in ran.calls) == 5


@effect("grading.workers", run="gathered")
def _(ran: Ran) -> None:
    assert len({call["pid"] for call in ran.calls}) == 2


@effect("grading.asynchronous", run="gathered")
def _(ran: Ran) -> None:
    """Nothing is graded before the last response of the round is there."""
    for step in range(len(ran.steps)):
        assert ran.places(step, "AttemptFinished")[-1] < ran.places(step, "GradeAttempt")[0]


# --- run ``scripted``: a reward that fails and hangs ---------------------------------------------


@effect("rewards[].timeout_s", run="scripted")
def _(ran: Ran) -> None:
    assert "timed out after 1.5 s" in ran.said


@effect("grading.retries", run="scripted")
def _(ran: Ran) -> None:
    """No response of the prompt that nobody can grade is tried twice."""
    tried = ran.table.filter(pl.col("prompt") == "p3")
    assert "failed" in set(tried["state"])
    assert sum(call["prompts"] == ["003"] for call in ran.calls) <= tried.height


@effect("rollout.max_retries", run="scripted")
def _(ran: Ran) -> None:
    """Three responses, and one replacement for each."""
    assert ran.table.filter(pl.col("prompt") == "p3").height == 3 + 3
    assert "prompt p3 is dropped" in ran.said


described(
    "given-up",
    {
        "rewards.0.name": "good",
        "rewards.1.function": "{here}/{name}.py:ill",
        "rewards.1.on_error": "skip",
    },
    slow=True,
)


@effect("rewards[].on_error=skip", run="given-up")
def _(ran: Ran) -> None:
    """A function that only fails is left out, and the run goes on to its end."""
    assert ran.called("ill")
    assert ran.summary["steps"] == 3
    assert ran.metrics[-1]["reward"] == pytest.approx(ran.metrics[-1]["rewards/good/mean"])


# --- programs, whose timeouts follow their tests -------------------------------------------------

PROGRAMS = {
    "model.path": "{here}/programs",
    "data.path": "{here}/tested.jsonl",
    "rewards.0.function": "code",
    "rollout.max_completion_length": 8,
    "grading.code_timeout.most_s": 3.0,
    "epochs": 2,
}
described("patient", PROGRAMS | {"grading.code_timeout.least_s": 0.4}, slow=True)
STRICT = PROGRAMS | {"grading.code_timeout.least_s": 0.001}
described("strict", STRICT, slow=True)
described("tight", STRICT | {"grading.code_timeout.factor": 20.0}, slow=True)
described("steady", PROGRAMS | {"grading.code_timeout.adaptive": False}, slow=True)


def timeouts(ran: Ran) -> list[float]:
    """Mean timeout given in each step, seconds."""
    return [row.get("rewards/code/timeout_s", 0.0) for row in ran.metrics]


@effect("grading.code_timeout.most_s", run="steady")
def _(ran: Ran) -> None:
    assert timeouts(ran)[0] == pytest.approx(3.0)


@effect("grading.code_timeout.adaptive", run="steady", against="patient")
def _(ran: Ran) -> None:
    """The tests have been passed, and nothing has changed."""
    assert sum(row["rewards/code/passed"] for row in ran.metrics) > 0
    assert timeouts(ran) == pytest.approx([3.0] * len(ran.metrics))


@effect("grading.code_timeout.least_s", run="patient", against="steady")
def _(ran: Ran) -> None:
    """The programs take milliseconds: what a passed test gets is the least."""
    assert min(timeouts(ran)[3:]) == pytest.approx(0.4, abs=1e-3)


@effect("grading.code_timeout.factor", run="tight", against="strict")
def _(ran: Ran) -> None:
    """Far more than a passed test took, far less than the most."""
    anchors = dict(ran.state(len(ran.metrics))["rewards"]["anchors"]).values()
    assert min(timeouts(ran)[3:]) > 8 * sum(anchors) / len(anchors)
