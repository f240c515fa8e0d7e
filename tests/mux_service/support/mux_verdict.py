"""Does a recorded history fit the log? The log is the order; it has to explain every answer."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

from mux_fleet import History, Op, Use

SLACK_S = 1e-3


def overlaps(uses: list[Use]) -> list[tuple[str, Use, Use]]:
    """Pairs of permits that were worked under on one node at one time."""
    by_node: dict[str, list[Use]] = defaultdict(list)
    for use in uses:
        for node in use.nodes:
            by_node[node].append(use)
    found = []
    for node, mine in by_node.items():
        mine.sort(key=lambda use: use.start)
        for before, after in pairwise(mine):
            if after.start < before.end and after.token != before.token:
                found.append((node, before, after))
    return found


class Log:
    """The journal, indexed for the checks."""

    def __init__(self, text: str, offset: float) -> None:
        self.entries: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
        self.offset = offset
        self.problems: list[str] = []
        self.submitted: dict[str, float] = {}
        self.finished: dict[int, float] = {}
        self.lost: dict[int, float] = {}
        self.granted: dict[int, dict[str, Any]] = {}
        self.trained: dict[str, list[float]] = defaultdict(list)
        self.ended: dict[str, float] = {}
        self._busy: dict[str, int] = {}
        last = 0.0
        for number, entry in enumerate(self.entries, start=1):
            if entry["seq"] != number or entry["t"] < last:
                self.problems.append(f"entry {number} is out of order")
            last = entry["t"]
            self._read(entry["t"] - offset, entry["event"], entry["decisions"])

    def _read(self, at: float, event: dict[str, Any], decisions: list[dict[str, Any]]) -> None:
        """The sequential rules, without the scheduler's code."""
        kind = event["kind"]
        if kind == "JobArrived":
            self._new(self.submitted, event["spec"]["id"], at, "submitted twice")
        elif kind == "PhaseFinished":
            self._free(event["token"])
            self._new(self.finished, event["token"], at, "finished twice")
            if event["phase"] == "train":
                self.trained[event["job"]].append(at)
        elif kind == "PermitLost":
            self._free(event["token"])
            self._new(self.lost, event["token"], at, "lost twice")
        elif kind == "JobEnded":
            self._new(self.ended, event["job"], at, "ended twice")
        for made in decisions:
            if made["kind"] == "Permit":
                self._grant(made)
            elif made["kind"] in ("Depart", "Move"):
                self._busy = {
                    node: token
                    for node, token in self._busy.items()
                    if self.granted[token]["job"] != made["job"]
                }

    def _new(self, table: dict[Any, float], key: Any, at: float, problem: str) -> None:
        if key in table:
            self.problems.append(f"{key} {problem}")
        table[key] = at

    def _grant(self, made: dict[str, Any]) -> None:
        token = made["token"]
        if token <= max(self.granted, default=-1):
            self.problems.append(f"token {token} does not grow")
        self.granted[token] = made
        for node in made["nodes"]:
            if node in self._busy:
                self.problems.append(f"{node}: token {token} while {self._busy[node]} is out")
            self._busy[node] = token

    def _free(self, token: int) -> None:
        if token not in self._busy.values():
            self.problems.append(f"token {token} ends but is not out")
        self._busy = {node: each for node, each in self._busy.items() if each != token}

    def explain(self, op: Op) -> str | None:
        """What is wrong with an answer; None where the log explains it."""
        match op.kind:
            case "submit":
                return self._within(op, self.submitted.get(op.args[0]))
            case "finish" if op.status == 200:
                return self._within(op, self.finished.get(op.args[1]))
            case "abandon" if op.status == 200:
                return self._within(op, self.lost.get(op.args[1]))
            case "finish" | "abandon":
                over = min(self.finished.get(op.args[1], 1e18), self.lost.get(op.args[1], 1e18))
                return None if over < op.answered else f"refused while it was out: {op}"
            case "end" if op.status == 200:
                return self._within(op, self.ended.get(op.args[0]))
            case "permit" if "token" in op.body and op.status == 200:
                made = self.granted.get(op.body["token"])
                fits = made is not None and made["nodes"] == op.body["nodes"]
                return None if fits else f"a permit that nobody gave: {op}"
            case "look":
                times = self.trained[op.args[0]]
                low = sum(at < op.invoked - SLACK_S for at in times)
                high = sum(at < op.answered + SLACK_S for at in times)
                done = op.body["done"]
                return None if low <= done <= high else f"read {done}, not {low}..{high}: {op}"
        return None

    def _within(self, op: Op, at: float | None) -> str | None:
        if at is None:
            return f"acknowledged but not in the log: {op}"
        if not op.invoked - SLACK_S <= at <= op.answered + SLACK_S:
            return f"happened at {at:.4f}, outside {op.invoked:.4f}..{op.answered:.4f}: {op}"
        return None


def verdict(histories: list[History], log: Log) -> dict[str, Any]:
    """Counts, and every violation."""
    ops = [op for history in histories for op in history.ops]
    uses = [use for history in histories for use in history.uses]
    stale = [op for history in histories for op in history.stale]
    acked = {op.args[0] for op in ops if op.kind == "submit" and op.status == 201}
    unexplained = [problem for op in ops if (problem := log.explain(op))]
    return {
        "ops": len(ops),
        "jobs_acknowledged": len(acked),
        "jobs_lost": sorted(acked - log.submitted.keys()),
        "permits": len(uses),
        "overlaps": overlaps(uses),
        "stale_tried": len(stale),
        "stale_accepted": [op for op in stale if op.status not in (404, 409)],
        "log": log.problems,
        "unexplained": unexplained,
    }
