"""Runs whose engines span devices: what their journals and timelines say."""

import json
from pathlib import Path
from typing import Any


def entries(folder: Path) -> list[dict[str, Any]]:
    """Lines of the journal, without those that describe the run."""
    lines = (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry for entry in map(json.loads, lines) if "event" in entry]


def decided(folder: Path, kind: str) -> list[tuple[int, dict[str, Any]]]:
    """Decisions of a kind, with their step."""
    found, step = [], -1
    for entry in entries(folder):
        if entry["event"]["kind"] == "StepStarted":
            step = entry["event"]["step"]
        found += [(step, each) for each in entry["decisions"] if each["kind"] == kind]
    return found


def happened(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind."""
    return [entry["event"] for entry in entries(folder) if entry["event"]["kind"] == kind]


def streamed(folder: Path) -> set[int]:
    """Steps in which a replica was told to sum gradients while responses were still decoded."""
    asked, found, step = False, set[int](), -1
    for entry in entries(folder):
        event = entry["event"]
        if event["kind"] == "StepStarted":
            asked, step = False, event["step"]
        elif event["kind"] == "AttemptFinished" and asked:
            found.add(step)
        asked |= any(each["kind"] == "AccumulateGradients" for each in entry["decisions"])
    return found


def timeline_rows(folder: Path) -> dict[str, set[str]]:
    """Categories of what the timeline shows of each process."""
    events = json.loads((folder / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found: dict[str, set[str]] = {name: set() for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["pid"]]].add(event["cat"])
    return found
