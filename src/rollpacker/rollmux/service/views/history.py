"""The log for readers: as a journal, and in the form that ``rollpacker mux check`` reads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from rollpacker.core.codec import dumps, loads
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.event_log import Line, head, line, lines_of, lines_of_node
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.store.store import Store

_PIECE = 200


def journal(store: Store, after: int = 0) -> Generator[str, None, None]:
    """Every entry after a number: its time, event and decisions, one JSON object a line."""
    with closing(store):
        lines: list[str] = []
        for entry in store.entries(after):
            lines.append(
                f'{{"seq":{entry.seq},"t":{entry.t!r},"event":{entry.event},'
                f'"decisions":{entry.decisions}}}\n'
            )
            if len(lines) == _PIECE:
                yield "".join(lines)
                lines = []
        yield "".join(lines)


def event_log(store: Store, settings: Settings) -> Generator[str, None, None]:
    """A meta line with all jobs, then what happened to them."""
    with closing(store):
        jobs, last = _jobs(store)
        yield json.dumps(head(settings, jobs)) + "\n"
        lines = Lines({job["id"]: job["iterations"] for job in jobs})
        for entry in store.entries():
            if entry.seq > last:
                return
            made = lines.of(
                entry.t, loads(entry.event), daemon_events.decode_decisions(entry.decisions)
            )
            if made:
                yield "".join(json.dumps(each) + "\n" for each in made)


def _jobs(store: Store) -> tuple[list[dict[str, Any]], int]:
    """Every job's specification with the seconds that its phases took alone."""
    jobs: dict[str, dict[str, Any]] = {}
    last = 0
    for entry in store.entries():
        last = entry.seq
        event = loads(entry.event)
        if event["kind"] == "JobArrived":
            spec = event["spec"]
            more = {"arrival_s": entry.t, "rollout_s": [], "train_s": [], "solo_s": []}
            jobs[spec["id"]] = spec | more | {"live": True}
        elif event["kind"] == "JobEnded":
            jobs[event["job"]]["live"] = False
        elif event["kind"] == "PhaseFinished":
            _add_seconds(jobs[event["job"]], event)
    return list(jobs.values()), last


def _add_seconds(job: dict[str, Any], event: dict[str, Any]) -> None:
    done = len(job["train_s"])
    if event["phase"] == "train":
        job["train_s"].append(event["seconds"])
        job["solo_s"].append(round(job["rollout_s"][done] + event["seconds"], 6))
    else:
        # A rollout that a failure made void is done again.
        job["rollout_s"][done:] = [event["seconds"]]


class Lines:
    """Turns entries into lines of the event log; remembers permits and moves that are out.

    Args:
        iterations: of each job; None where nobody knows.
    """

    def __init__(self, iterations: Mapping[str, int | None]) -> None:
        self._iterations = iterations
        self._done: Counter[str] = Counter()
        self._next: dict[str, str] = {}
        self._permits: dict[str, do.Permit] = {}
        self._moves: dict[str, do.Move] = {}
        self._made: list[Line] = []
        self._t = 0.0

    def of(self, t: float, event: dict[str, Any], decisions: Sequence[do.Decision]) -> list[Line]:
        """The lines of one entry."""
        self._made, self._t = [], t
        if (handle := _EVENTS.get(event["kind"])) is not None:
            handle(self, event)
        for decision in decisions:
            told = lines_of(t, decision)
            match decision:
                case do.Move():
                    self._permits.pop(decision.job, None)
                    self._next[decision.job] = "rollout"
                    self._moves[decision.job] = decision
                case do.Permit():
                    self._permits[decision.job] = decision
                case do.Wait():
                    self._permits.pop(decision.job, None)
                    self._moves.pop(decision.job, None)
                    self._next[decision.job] = "rollout"
                case do.Depart():
                    told = self._depart(decision.job, told)
                case _:
                    pass
            self._made.extend(told)
        return self._made

    def _write(self, kind: str, job: str | None, **more: Any) -> None:
        self._made.append(line(self._t, kind, job, **more))

    def _phase_over(self, job: str, **more: Any) -> None:
        permit = self._permits.pop(job, None)
        if permit is not None:
            same = {"phase": permit.phase, "epoch": permit.epoch, "token": permit.token}
            self._write("end", job, **same, nodes=list(permit.nodes), **more)

    def _finished(self, event: dict[str, Any]) -> None:
        job, phase = event["job"], event["phase"]
        self._phase_over(job, seconds=event["seconds"])
        self._done[job] += phase == "train"
        self._next[job] = "train" if phase == "rollout" else "rollout"

    def _lost(self, event: dict[str, Any]) -> None:
        self._phase_over(event["job"], lost=True)

    def _moved(self, event: dict[str, Any]) -> None:
        move = self._moves.pop(event["job"], None)
        if move is not None:
            nodes = [*move.rollout, *move.train]
            self._write("end", event["job"], phase="sync", nodes=nodes)

    def _of_node(self, event: dict[str, Any]) -> None:
        recorded = daemon_events.decode(dumps(event).decode())
        if not isinstance(recorded, daemon_events.Note):
            self._made.extend(lines_of_node(self._t, recorded))

    def _depart(self, job: str, told: list[Line]) -> list[Line]:
        self._phase_over(job, lost=True)
        self._moves.pop(job, None)
        wanted, done = self._iterations[job], self._done[job]
        inside = self._next.get(job) == "train"
        cancelled = inside or (not done if wanted is None else done < wanted)
        return [each | {"cancelled": True} for each in told] if cancelled else told


_EVENTS: dict[str, Callable[[Lines, dict[str, Any]], None]] = {
    "PhaseFinished": Lines._finished,
    "PermitLost": Lines._lost,
    "MoveFinished": Lines._moved,
    "NodeFailed": Lines._of_node,
    "NodeJoined": Lines._of_node,
    "NodeClosed": Lines._of_node,
    "NodeOpened": Lines._of_node,
    "NodeRemoved": Lines._of_node,
}
