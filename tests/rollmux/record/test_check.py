"""The checker finds a planted violation of every kind, and nothing in a clean log."""

import json
from collections.abc import Callable

import pytest
from cluster_worlds import run, small
from event_check import check_lines

from rollpacker.rollmux.model.settings import Settings

Log = list[dict]


@pytest.fixture(scope="module")
def clean() -> str:
    _, violations, text = run(small(1, mean_hours=3.0), Settings())
    assert violations == []
    return text


def find(log: Log, kind: str, phase: str | None = None, nth: int = 0) -> int:
    hits = [
        n
        for n, event in enumerate(log)
        if event["kind"] == kind and (phase is None or event.get("phase") == phase)
    ]
    return hits[nth]


def lose_a_job(log: Log) -> None:
    log.pop(find(log, "depart", nth=-1))


def never_place(log: Log) -> None:
    log[0]["jobs"].append(log[0]["jobs"][0] | {"id": "ghost"})


def depart_early(log: Log) -> None:
    log[0]["jobs"][0]["iterations"] += 1


def overfill(log: Log) -> None:
    event = log[find(log, "place")]
    event["memory_gb"] = {node: 2000.0 for node in event["memory_gb"]}


def twice_on_a_node(log: Log) -> None:
    """Another member starts while a rollout runs."""
    busy: dict[str, str] = {}
    for n, event in enumerate(log):
        if event["kind"] == "start" and event["phase"] != "sync":
            busy |= {node: event["job"] for node in event["nodes"]}
            continue
        if event["kind"] in ("end", "tail_release"):
            shared = set(event["nodes"])
            later = [
                m
                for m in range(n + 1, min(n + 40, len(log)))
                if log[m]["kind"] == "start"
                and log[m]["job"] != event["job"]
                and shared & set(log[m]["nodes"])
            ]
            if later and event["kind"] == "end" and log[later[0]]["t"] == event["t"]:
                start = log.pop(later[0])
                log.insert(n, start)
                return
    raise AssertionError("no handover in the log")


def skip_training(log: Log) -> None:
    name = log[find(log, "permit", "train")]["job"]
    dropped = [n for n, e in enumerate(log) if e.get("job") == name and e.get("phase") == "train"][
        :3
    ]
    for n in reversed(dropped):
        log.pop(n)


def reuse_a_token(log: Log) -> None:
    log[find(log, "permit", nth=5)]["token"] = log[find(log, "permit", nth=2)]["token"]


def start_unpermitted(log: Log) -> None:
    log.pop(find(log, "permit", "rollout", nth=3))


def permit_twice(log: Log) -> None:
    n = find(log, "permit", "rollout", nth=3)
    log.insert(n, log[n] | {"token": -1})


def elsewhere(log: Log) -> None:
    log[find(log, "start", "rollout", nth=3)]["nodes"] = ["r999"]


def too_slow(log: Log) -> None:
    log[0]["jobs"][0]["slo"] = 0.5


def too_fast(log: Log) -> None:
    log[0]["jobs"][0]["train_s"] = [s * 5 for s in log[0]["jobs"][0]["train_s"]]


def backwards(log: Log) -> None:
    log[-1]["t"] = 1.0


def on_a_dead_node(log: Log) -> None:
    n = find(log, "place", nth=2)
    log.insert(n, {"t": log[n]["t"], "kind": "node_down", "job": None, "nodes": log[n]["nodes"]})


def old_epoch(log: Log) -> None:
    log[find(log, "rebase", nth=-1)]["epoch"] = -1


def move_inside_an_iteration(log: Log) -> None:
    n = find(log, "end", "rollout", nth=4)
    log.insert(
        n, {**log[n], "kind": "move", "nodes": ["r7", "t7"], "memory_gb": {"r7": 1, "t7": 1}}
    )


def stranger(log: Log) -> None:
    log[find(log, "permit")]["job"] = "nobody"


def odd_kind(log: Log) -> None:
    log[find(log, "permit")]["kind"] = "wish"


def leak(log: Log) -> None:
    log[find(log, "move", nth=0)]["memory_gb"]["r777"] = 5.0


@pytest.mark.parametrize(
    ("plant", "rule"),
    [
        (lose_a_job, "lost_job"),
        (lose_a_job, "leaked_node"),
        (never_place, "lost_job"),
        (depart_early, "iterations"),
        (overfill, "memory"),
        (twice_on_a_node, "exclusive"),
        (skip_training, "alternation"),
        (reuse_a_token, "token"),
        (start_unpermitted, "no_permit"),
        (permit_twice, "double_permit"),
        (elsewhere, "residency"),
        (too_slow, "slo"),
        (too_fast, "too_fast"),
        (backwards, "time"),
        (on_a_dead_node, "dead_node"),
        (old_epoch, "epoch"),
        (move_inside_an_iteration, "move_mid_iteration"),
        (stranger, "unknown_job"),
        (odd_kind, "unknown_kind"),
        (leak, "residency"),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_a_planted_violation_is_found(clean: str, plant: Callable[[Log], None], rule: str) -> None:
    log = [json.loads(line) for line in clean.splitlines()]
    plant(log)
    found = {each.rule for each in check_lines(json.dumps(event) for event in log)}
    assert rule in found


META = '{"kind": "meta", "memory_cap_gb": 9, "jobs": []}'


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([], "empty"),
        (['{"kind": "place", "t": 0}'], "line 1: expected the meta line"),
        (["no json"], "line 1"),
        ([META, '{"t": 1}'], "line 2: no 'kind'"),
        ([META, '{"t": 1, "kind": "depart"}'], "line 2: no 'job'"),
    ],
)
def test_what_is_no_log_is_said(lines: list[str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        check_lines(lines)


def test_the_checker_knows_nothing_of_the_scheduler() -> None:
    import ast
    from pathlib import Path

    import event_check
    import event_check_nodes

    for each in (event_check, event_check_nodes):
        tree = ast.parse(Path(each.__file__).read_text(encoding="utf-8"))
        modules = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        ours = {name for name in modules if name.startswith("rollpacker")}
        assert not ours
