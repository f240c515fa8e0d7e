"""Inventory files: the nodes of a cluster and their teams, in YAML.

    nodes:
      - {name: "h20-[00-63]", pool: rollout, memory_gb: 1536, devices: 8, rack: a}
      - {name: "h800-[00-63]", pool: train, memory_gb: 1536, devices: 8, labels: {nvlink: "yes"}}
    teams:
      - {name: math, rollout: 40, train: 40}

For rented nodes, give prices in dollars an hour and optional limits instead:

    cloud:
      rollout: {price: 14.8, limit: 100}
      train: {price: 42.24}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rollpacker.core.codec import plain
from rollpacker.rollmux.model.inventory import POOL_NAMES, Machine, count_pools
from rollpacker.rollmux.model.settings import Prices, Settings, Team

SCARCE_MARGIN = 0.05
"""Share of slowdown budgets that plans do not use if nodes are limited (experiments/LOG.md)."""
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
_KEYS = ("nodes", "teams", "cloud")


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryFile:
    """The content of an inventory file. A cloud has prices in dollars per hour, and no machines."""

    machines: tuple[Machine, ...] = ()
    teams: tuple[Team, ...] = ()
    prices: Prices | None = None
    limit: tuple[int | None, int | None] = (None, None)

    def settings(self, base: Settings) -> Settings:
        """Settings for these nodes. Owned nodes cost the same whether they are used or not."""
        scarce = replace(base, margin=max(base.margin, SCARCE_MARGIN), teams=self.teams)
        if self.prices is None:
            each = Prices(rollout=1.0, train=1.0)
            cap = max((machine.memory_gb for machine in self.machines), default=base.memory_cap_gb)
            return replace(scarce, nodes="named", prices=each, memory_cap_gb=cap)
        free = self.limit == (None, None)
        found = replace(base, teams=self.teams) if free else scarce
        return replace(found, prices=self.prices, limit=self.limit)


def read(path: Path) -> InventoryFile:
    """Read an inventory file. Raises ``ValueError`` with a one-line reason."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}".replace("\n", " ")) from error
    try:
        return parse(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(data: object) -> InventoryFile:
    """Check the content of an inventory file. Raises ``ValueError``."""
    found = _mapping(data, "the file")
    for key in found:
        if key not in _KEYS:
            raise ValueError(f"unknown key {key!r}; known: {', '.join(_KEYS)}")
    if ("nodes" in found) == ("cloud" in found):
        raise ValueError("give either nodes (by name) or cloud (by price)")
    teams = tuple(_team(each, f"teams[{n}]") for n, each in enumerate(_sequence(found, "teams")))
    if len({team.name for team in teams}) < len(teams):
        raise ValueError("teams: two teams have the same name")
    if "cloud" in found:
        return _cloud(_mapping(found["cloud"], "cloud"), teams)
    machines = tuple(
        machine
        for n, each in enumerate(_sequence(found, "nodes"))
        for machine in _machines(each, f"nodes[{n}]")
    )
    made = InventoryFile(machines=machines, teams=teams)
    # An empty list is allowed: all nodes then join by their agents.
    for pool, count in enumerate(count_pools(machines) if machines else ()):
        if not count:
            raise ValueError(f"nodes: there is no {POOL_NAMES[pool]} node")
        owned = sum(team.guaranteed[pool] for team in teams)
        if owned > count:
            raise ValueError(
                f"teams: {owned:g} {POOL_NAMES[pool]} nodes are guaranteed, but there are {count}"
            )
    if len({machine.name for machine in machines}) < len(machines):
        names = [machine.name for machine in machines]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"nodes: {double} is listed twice")
    return made


def _mapping(data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected keys and values")
    return {str(key): value for key, value in data.items()}  # pyright: ignore


def _sequence(found: Mapping[str, Any], key: str) -> Sequence[object]:
    data = found.get(key, [])
    if not isinstance(data, list):
        raise ValueError(f"{key}: expected a list")
    return data  # pyright: ignore


def _made(kind: type[Any], data: object, where: str) -> Any:
    """Make a record from a mapping. Errors name the place."""
    values = _mapping(data, where)
    known = kind.__dataclass_fields__
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(known)}")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from error


def _team(data: object, where: str) -> Team:
    return _made(Team, data, where)


def _machines(data: object, where: str) -> Iterator[Machine]:
    values = dict(_mapping(data, where))
    values["labels"] = {
        key: str(value) for key, value in _mapping(values.get("labels", {}), where).items()
    }
    machine: Machine = _made(Machine, values, where)
    for name in expand(machine.name):
        yield Machine(**(plain(machine) | {"name": name}))


def _cloud(found: Mapping[str, Any], teams: tuple[Team, ...]) -> InventoryFile:
    prices, limits = dict[str, float](), dict[str, int]()
    for key, value in found.items():
        if key not in POOL_NAMES:
            raise ValueError(f"cloud: unknown key {key!r}; known: {', '.join(POOL_NAMES)}")
        for what, number in _mapping(value, f"cloud.{key}").items():
            if what not in ("price", "limit"):
                raise ValueError(f"cloud.{key}: unknown key {what!r}; known: price, limit")
            if not isinstance(number, int | float) or number <= 0:
                raise ValueError(f"cloud.{key}.{what}: expected a positive number")
            if what == "price":
                prices[key] = float(number)
            else:
                limits[key] = int(number)
    limit = limits.get("rollout"), limits.get("train")
    return InventoryFile(teams=teams, prices=Prices(**prices), limit=limit)


def expand(name: str) -> list[str]:
    """Expand ``gpu[08-11]`` to gpu08, gpu09, gpu10 and gpu11, as in Slurm's host lists."""
    match = _RANGE.search(name)
    if match is None:
        return [name]
    first, last = match.groups()
    if int(first) > int(last):
        raise ValueError(f"node {name}: the range ends before it begins")
    width = len(first)
    return [
        each
        for number in range(int(first), int(last) + 1)
        for each in expand(f"{name[: match.start()]}{number:0{width}d}{name[match.end() :]}")
    ]
