"""The log for readers: as a journal, and as the event log that simulations write too."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from rollpacker.core.codec import loads
from rollpacker.rollmux.model import decisions as do
from rollpacker.rollmux.model import events as ev
from rollpacker.rollmux.model.settings import Settings
from rollpacker.rollmux.record.event_log import Line, head, line, lines_of
from rollpacker.rollmux.service.state import daemon_events
from rollpacker.rollmux.service.store import Store

_PIECE = 200


def journal(store: Store, after: int = 0) -> Generator[str, None, None]:
    """Every entry after a number as a line of JSON: its time, event and decisions."""
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
    """A meta line with all jobs, then their events."""
    with closing(store):
        jobs, last = _jobs(store)
        yield json.dumps(head(settings, jobs)) + "\n"
        lines = Lines({job["id"]: job["iterations"] for job in jobs})
        for entry in store.entries():
            if entry.seq > last:
                return
            decisions = daemon_events.decode_decisions(entry.decisions)
            made = lines.of(entry.t, daemon_events.decode(entry.event), decisions)
            if made:
                yield "".join(json.dumps(each) + "\n" for each in made)


def _jobs(store: Store) -> tuple[list[dict[str, Any]], int]:
    """Every job's specification with the seconds of its phases alone."""
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
        # A rollout lost in a failure is repeated.
        job["rollout_s"][done:] = [event["seconds"]]


class Lines:
    """Turns entries into lines of the event log. It remembers live permits and moves.

    ``iterations`` are those of each job (None if unknown).
    """

    def __init__(self, iterations: Mapping[str, int | None]) -> None:
        self._iterations = iterations
        self._done: Counter[str] = Counter()
        self._next: dict[str, str] = {}
        self._permits: dict[str, do.Permit] = {}
        self._moves: dict[str, do.Move] = {}

    def of(
        self, t: float, event: daemon_events.Recorded, decisions: Sequence[do.Decision]
    ) -> list[Line]:
        made = [*self._ended(t, event), *lines_of(t, event)]
        for decision in decisions:
            made += self._decided(t, decision)
        return made

    def _ended(self, t: float, event: daemon_events.Recorded) -> list[Line]:
        match event:
            case ev.PhaseFinished():
                self._done[event.job] += event.phase == "train"
                self._next[event.job] = "train" if event.phase == "rollout" else "rollout"
                return self._phase_over(t, event.job, seconds=event.seconds)
            case ev.PermitLost():
                return self._phase_over(t, event.job, lost=True)
            case ev.MoveFinished() if (move := self._moves.pop(event.job, None)) is not None:
                nodes = [*move.rollout, *move.train]
                return [line(t, "end", event.job, phase="sync", nodes=nodes)]
            case _:
                return []

    def _decided(self, t: float, decision: do.Decision) -> list[Line]:
        told = lines_of(t, decision)
        match decision:
            case do.Permit():
                self._permits[decision.job] = decision
            case do.Move() | do.Wait():
                self._permits.pop(decision.job, None)
                self._moves.pop(decision.job, None)
                self._next[decision.job] = "rollout"
                if isinstance(decision, do.Move):
                    self._moves[decision.job] = decision
            case do.Depart():
                if self._is_cancelled(decision.job):
                    told = [each | {"cancelled": True} for each in told]
                self._moves.pop(decision.job, None)
                return [*self._phase_over(t, decision.job, lost=True), *told]
            case _:
                pass
        return told

    def _phase_over(self, t: float, job: str, **more: Any) -> list[Line]:
        permit = self._permits.pop(job, None)
        if permit is None:
            return []
        same = {"phase": permit.phase, "epoch": permit.epoch, "token": permit.token}
        return [line(t, "end", job, **same, nodes=list(permit.nodes), **more)]

    def _is_cancelled(self, job: str) -> bool:
        """Whether a departing job has iterations left, or is inside of one."""
        wanted, done = self._iterations[job], self._done[job]
        inside = self._next.get(job) == "train"
        return inside or (not done if wanted is None else done < wanted)
