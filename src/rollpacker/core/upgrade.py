"""What earlier versions wrote into journals and configurations, as it is written today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

VERSION = 2
"""Of the lines that are written, named in every ``meta`` line; version 1 named none."""

_RENAMED = {
    "AttemptMigrated": ("worker", "engine"),
    "GradientsAccumulated": ("worker", "replica"),
    "StartAttempt": ("worker", "engine"),
    "AccumulateGradients": ("worker", "replica"),
    "RegroupWorkers": ("lead", "engine"),
}
"""Version 1 knew workers, each with an engine and a replica (or a part of one)."""

_RENAMED_SETTINGS = (
    ("rules", "tail_workers", "tail_engines"),
    ("machine", "worker_devices", "engine_devices"),
)

RENAMED_KEYS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "workers": {
        "count": ("devices", "per_node"),
        "per_gpu": ("devices", "per_gpu"),
        "threads": ("devices", "threads"),
        "pin": ("devices", "pin"),
        "device": ("devices", "kind"),
        "heartbeat_s": ("cluster", "heartbeat_s"),
    }
}
"""Sections of a run's configuration that are no more: where each key went, as (section, key)."""


def config_of_now(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that a run of an earlier version wrote, with today's keys.

    What it says of today's keys itself counts; what is not known stays where it is.
    """
    now = {key: value for key, value in tree.items() if key not in RENAMED_KEYS}
    for section in tree.keys() & RENAMED_KEYS.keys():
        new, old = RENAMED_KEYS[section], tree[section]
        if not isinstance(old, dict) or not old.keys() <= new.keys():
            now[section] = old
            continue
        for key, value in cast(dict[str, Any], old).items():
            name, leaf = new[key]
            now[name] = {leaf: value} | now.get(name, {})
    return now


class Upgrade:
    """Takes a journal's lines in order."""

    def __init__(self) -> None:
        self._version = 1
        self._size = 1
        self._replicas: list[int] = []
        self._last: int | None = None

    def line(self, line: dict[str, Any]) -> dict[str, Any]:
        """The line as this version would write it.

        Raises ``ValueError`` when it was written by a later rollpacker.
        """
        if "meta" in line:
            self._version = line.get("version", 1)
            if self._version > VERSION:
                version = f"version {self._version} of the journal"
                raise ValueError(f"written by a later rollpacker, in {version}")
            if self._version == 1:
                self._size = line["meta"].get("settings", {}).get("rules", {}).get("replica", 1)
                return line | {"meta": _meta(line["meta"])}
        elif self._version == 1 and "event" in line and "decisions" in line:
            event = self._event(line["event"])
            return line | {"event": event, "decisions": self._decisions(event, line["decisions"])}
        return line

    def _event(self, event: dict[str, Any]) -> dict[str, Any]:
        match event.get("kind"):
            case "StepStarted":
                event = dict(event)
                engines = event.pop("workers")
                self._replicas, self._last = engines[:: self._size], None
                return event | {"engines": engines, "replicas": self._replicas}
            case "WorkerLost":
                worker = event["worker"]
                lost = [max((r for r in self._replicas if r <= worker), default=worker)]
                self._replicas = [r for r in self._replicas if r not in lost]
                return {"kind": "DevicesLost", "engines": [worker], "replicas": lost}
            case _:
                return _renamed(event)

    def _decisions(self, event: dict[str, Any], made: list[Any]) -> list[dict[str, Any]]:
        """Version 1 published weights without saying so."""
        for decision in made:
            if decision["kind"] == "ApplyUpdate" and decision["last"]:
                self._last = decision["update"]
        made = [_renamed(decision) for decision in made]
        if event.get("kind") == "UpdateApplied" and event["update"] == self._last:
            made.append({"kind": "PublishWeights", "version": event["step"] + 1})
        return made


def _meta(meta: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew colocated devices only, and how many workers a replica had."""
    settings = dict(meta.get("settings", {}))
    for section, old, new in _RENAMED_SETTINGS:
        if settings.get(section):
            fields = {new if key == old else key: v for key, v in settings[section].items()}
            settings[section] = fields
    if "rules" in settings:
        rules = {key: value for key, value in settings["rules"].items() if key != "replica"}
        settings["rules"] = rules | {"layout": "colocated"}
    return meta | {"settings": settings} if settings else meta


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    kind = record.get("kind", "")
    if kind not in _RENAMED:
        return record
    old, new = _RENAMED[kind]
    kind = "FormEngine" if kind == "RegroupWorkers" else kind
    return {new if k == old else k: v for k, v in record.items()} | {"kind": kind}
