"""A flat table of a framework's keys: for each one our key, or a reason why it needs none.

A missing key has its framework's default, which is written down if ours differs. A key without a
row, or with a value that its row does not know, must be set by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, cast

import yaml

from rollpacker.config import TrainConfig
from rollpacker.config.base import kind_of, sections

HAND = object()  # result of a conversion without a counterpart here (None if none is needed)
_OFF = (False, 0, "", [], {})
_SAME = "the same happens here"
_NEEDS = {
    "eval.": "eval.data.path",
    "engine.gpu_memory": "engine.kind",
    "model.lora_alpha": "model.lora_rank",
    "train.kl_bias_correction": "train.beta",
    "rollout.dynamic_sampling.max_draws": "rollout.dynamic_sampling.enabled",
}
"""Our keys that need another key, by their beginning."""
_LONGEST = 60
BY_HAND = "set by hand: "


class Unknown(str):
    """A value that the file does not contain: a shell variable or a Python expression."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Options of the command line, which override the file. See ``init``."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    held_out: str | None = None
    steps: int | None = None
    world: int | None = None

    def settings(self) -> dict[str, tuple[str, Any]]:
        given = {
            "model.path": ("--model", self.model),
            "data.path": ("--data", self.data),
            "rewards.0.function": ("--reward", self.reward),
            "eval.data.path": ("--eval-data", self.held_out),
            "steps": ("--steps", self.steps),
        }
        return {path: each for path, each in given.items() if each[1]}

    def replaced(self, path: str) -> str | None:
        """The option that overrides one of our keys."""
        group = path.partition(".")[0]
        path = {"rewards": "rewards.0.function", "epochs": "steps"}.get(group, path)
        for part in (".options.name", ".split"):
            path = path.replace(f"data{part}", "data.path")
        return self.settings().get(path, (None,))[0]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """The translation of a key.

    Args:
        kind: ``set``, ``read`` by a joint rule, ``hand`` or ``nothing``.
        to: our key. Its ``*`` stands for the text matched by the key's ``*``.
        value: converts the value to ours, ``HAND`` or None.
        default: the framework's default.
        note: a comment, a reason why it needs nothing, or a hint for setting it by hand.
        off: values that need nothing by hand.
    """

    kind: str
    to: str = ""
    value: Callable[[Any], Any] = lambda value: value
    default: Any = None
    note: str = ""
    off: tuple[Any, ...] = ()


def _from(least: int) -> Callable[[Any], Any]:
    return lambda value: max(least, value) if isinstance(value, int) else value


def _trackers(given: Any) -> Any:
    names = cast(list[Any], given if isinstance(given, list) else [given])
    known = [each for each in names if each in ("wandb", "trackio", "mlflow")]
    lines = ("console", "tensorboard", "file", "none", "all")
    return known or (None if all(each in lines for each in names) else HAND)


def _folder(path: Any) -> str:
    # Use a folder of its own, since TRL's checkpoints have the same names as ours.
    return f"runs/{str(path).strip('/').rpartition('/')[2] or 'run'}"


_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "same": lambda value: value,
    "not_0": lambda value: value or None,
    "positive": lambda value: None if isinstance(value, int) and value < 1 else value,
    "from_0": _from(0),
    "from_2": _from(2),
    "one_less": lambda value: value - 1 if isinstance(value, int) and value > 1 else HAND,
    "one_or_all": lambda files: files[0] if isinstance(files, list) and len(files) == 1 else files,
    "folder": _folder,
    "trackers": _trackers,
}
"""Conversions that the tables name."""


def _chosen(values: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """Map their values to ours. ``*`` stands for any other one."""

    def value(given: Any) -> Any:
        ours = values.get("*", HAND)
        ours = values.get(given, ours) if isinstance(given, str | int) else ours
        return given if ours == "*" else ours

    return value


def _row(to: str, how: Any = "same", default: Any = None, note: str = "") -> KeyRow:
    value = _chosen(cast(dict[Any, Any], how)) if isinstance(how, dict) else _CONVERSIONS[how]
    return KeyRow("set", to, value, default, note)


def _by_hand(hint: str, same: str) -> KeyRow:
    """A key to set by hand, except for the values ``same``, such as ``true|1``."""
    off = tuple(yaml.safe_load(each) for each in same.split("|")) if same else ()
    # If true is the same as here, false differs.
    return KeyRow("hand", note=hint, off=off if "true" in same else (*_OFF, *off))


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of a framework. ``*`` in a key is any text. ``joints`` run after the rows."""

    framework: str
    rows: Mapping[str, KeyRow]
    joints: Sequence[Callable[[Draft], None]]

    @classmethod
    def load(cls, framework: str, joints: Sequence[Callable[[Draft], None]]) -> Table:
        """Load the file beside this module. ``verl.yaml`` explains the format."""
        text = (
            files("rollpacker.cli.convert")
            .joinpath(f"{framework.lower()}.yaml")
            .read_text(encoding="utf-8")
        )
        rows: dict[str, KeyRow] = {}
        for start, kinds in cast(
            dict[str, dict[str, dict[str, Any]]], yaml.safe_load(text)
        ).items():
            for why, keys in kinds.get("nothing", {}).items():
                rows |= {f"{start}{key}": KeyRow("nothing", note=why) for key in keys.split()}
            for hint, keys in kinds.get("hand", {}).items():
                for key, _, same in (each.partition("=") for each in keys.split()):
                    rows[f"{start}{key}"] = _by_hand(hint, same)
            for key, default in kinds.get("read", {}).items():
                rows[f"{start}{key}"] = KeyRow("read", default=default)
            for key, row in kinds.get("set", {}).items():
                rows[f"{start}{key}"] = _row(*row)
        return cls(framework, rows, joints)

    def row(self, key: str) -> KeyRow | None:
        """The row of a key: its own, or that of the longest matching pattern."""
        if key in self.rows:
            return self.rows[key]
        fits = [pattern for pattern in self.rows if fnmatchcase(key, pattern)]
        return self.rows[max(fits, key=len)] if fits else None


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of ours, with its origin."""

    value: Any
    why: str
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class Draft:
    """A job in the making, and the result for each key.

    Args:
        given: the value of every key of ``file``, dotted if nested.
        asked: options, which override the file.
        ignored: keys that do not matter here, with a reason.
        refused: keys to set by hand, with a hint or an empty text.
        warnings: things to check first.
        text: the job file.
    """

    table: Table
    file: str
    given: dict[str, Any]
    asked: CommandLine
    settings: dict[str, Setting] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    text: str = ""

    @property
    def translated(self) -> list[str]:
        used = {key for setting in self.settings.values() for key in setting.keys}
        return [k for k in self.given if k in used and k not in self.refused]

    @property
    def by_hand(self) -> list[str]:
        """A line for each key to set by hand, with its value."""
        return [
            f"{BY_HAND}{key} ({said(self.given[key])}){hint and f': {hint}'}"
            for key, hint in self.refused.items()
        ]

    def has(self, key: str) -> bool:
        value = self.given.get(key)
        return value is not None and not isinstance(value, Unknown)

    def get(self, key: str) -> Any:
        """The value of a key, or the framework's default if it is missing or null."""
        row = self.table.row(key)
        return self.given[key] if self.has(key) else row.default if row else None

    def first(self, *keys: str) -> str:
        """The first given one of several names, else the first."""
        return next((key for key in keys if self.has(key)), keys[0])

    def number(self, key: str, least: int | None = None) -> int:
        """The whole number of a key, at least ``least``. Raises ``ValueError``."""
        number = self.real(key)
        if number != int(number) or (least is not None and number < least):
            from_ = "" if least is None else f" from {least} on"
            raise ValueError(f"{self.file}: {key}={said(number)}: expected a whole number{from_}")
        return int(number)

    def real(self, key: str) -> float:
        """The number of a key. Raises ``ValueError``."""
        value = self.get(key)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"{self.file}: {key}={said(value)}: expected a number")
        return value

    def known(self, key: str, values: Mapping[str, str]) -> str:
        """Our name for a value. Raises ``ValueError`` if there is none."""
        if str(self.get(key)) not in values:
            raise ValueError(
                f"{self.file}: {self.origin(key)} has no counterpart: rollpacker has "
                f"{', '.join(values)}"
            )
        return values[str(self.get(key))]

    def origin(self, key: str) -> str:
        """``key=value`` as in the file, or the framework's default."""
        default = "" if self.has(key) else f"{self.table.framework}'s default "
        return f"{default}{key}={said(self.get(key))}"

    def set(self, path: str, value: Any, *keys: str, note: str = "") -> None:
        """Set one of our dotted keys from ``keys``, unless an option sets it."""
        option = self.asked.replaced(path)
        if option:
            for key in keys:
                self.refused.pop(key, None)
            self.ignore(f"{option} overrides it", *keys)
            return
        why = ", ".join(map(self.origin, keys))
        note = f": {note}" if why and note else note
        self.settings[path] = Setting(value, f"{why}{note}", keys)

    def drop(self, path: str, why: str) -> None:
        """Remove one of our keys, unless an option has set it."""
        if path in self.settings and not self.asked.replaced(path):
            self.ignore(why, *self.settings.pop(path).keys)

    def ignore(self, why: str, *keys: str) -> None:
        self.ignored |= {key: why for key in keys if key in self.given}

    def refuse(self, hint: str, *keys: str) -> None:
        self.refused |= {key: hint for key in keys if key in self.given}


def said(value: Any) -> str:
    """A value in a comment: short, on one line, as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        text = f"[{', '.join(said(each) for each in cast(list[Any], value))}]"
    elif isinstance(value, dict):
        parts = cast(dict[Any, Any], value).items()
        text = f"{{{', '.join(f'{said(key)}: {said(each)}' for key, each in parts)}}}"
    else:
        text = f"{value:g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def fill(draft: Draft) -> None:
    """Translate every key of a draft: each is translated, ignored or left to be set by hand."""
    for key, value in draft.given.items():
        row = draft.table.row(key)
        if isinstance(value, Unknown) and (row is None or row.kind != "nothing"):
            draft.refuse("the file does not contain its value", key)
    for path, (option, value) in draft.asked.settings().items():
        draft.settings[path] = Setting(value, option)
    _rows(draft)
    for joint in draft.table.joints:
        joint(draft)
    _prune(draft)
    used = {*draft.translated, *draft.refused, *draft.ignored}
    for key in [each for each in draft.given if each not in used]:
        _judge(draft, key, draft.table.row(key))
    for key in [*draft.refused, *draft.translated]:
        draft.ignored.pop(key, None)


def _rows(draft: Draft) -> None:
    """Keys with one counterpart. The table's first name for a value counts."""
    rows = {pattern: row for pattern, row in draft.table.rows.items() if row.to}
    for pattern, row in rows.items():
        for key in [each for each in draft.given if fnmatchcase(each, pattern)]:
            _set(draft, key, row, row.to.replace("*", key.removeprefix(pattern.rstrip("*"))))
    # The default does not apply if the file has another value.
    given = {row.to for key, row in rows.items() if key in draft.refused}
    for key, row in rows.items():
        if row.default is not None and row.to not in {*draft.settings, *given}:
            draft.set(row.to, row.value(row.default), key, note=row.note)


def _set(draft: Draft, key: str, row: KeyRow, path: str) -> None:
    if draft.asked.replaced(path):
        draft.set(path, None, key)
        return
    ours = row.value(draft.get(key)) if draft.has(key) else None
    if ours is HAND:
        draft.refuse(f"{path} has no such value", key)
    elif path in draft.settings and ours is not None:
        winner = draft.settings[path]
        say = draft.ignore if winner.value == ours else draft.refuse
        say(f"{winner.keys[0]} overrides it", key)
    elif ours is not None:
        draft.set(path, ours, key, note=row.note)


def _prune(draft: Draft) -> None:
    for path in [*draft.settings]:
        for start, needed in _NEEDS.items():
            if path.startswith(start) and needed not in draft.settings:
                draft.drop(path, f"there is no {needed}")


def _judge(draft: Draft, key: str, row: KeyRow | None) -> None:
    value = draft.given[key]
    if row is None:
        draft.refuse(_near(draft, key), key)
    elif value is None:
        draft.ignore("null is the default", key)
    elif row.kind == "hand" and value not in row.off:
        draft.refuse(row.note, key)
    else:
        draft.ignore(row.note if row.kind == "nothing" else _SAME, key)


def _near(draft: Draft, key: str) -> str:
    """A hint for an unknown key that is close to a known one, or nothing."""
    table = draft.table
    start, dot, leaf = key.rpartition(".")
    known = [each for each in table.rows if each.rpartition(".")[:2] == (start, dot)]
    near = get_close_matches(leaf, [each.rpartition(".")[2] for each in known], 1, 0.85)
    if not near:
        return ""
    meant = f"{start}{dot}{near[0]}"
    default = table.rows[meant].default
    took = default is not None and not draft.has(meant)
    taken = f" Its default, {said(default)}, was taken" if took else ""
    return f"unknown key of {table.framework}; did you mean {meant}?{taken}"


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
"""YAML 1.1 reads ``1e-6`` as text, but hydra and transformers read a number."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^${}]*))?\}")
_DEEPEST = 5


def plain(value: Any) -> Any:
    """A value with its numbers as numbers, in lists too."""
    if isinstance(value, list):
        return [plain(each) for each in cast(list[Any], value)]
    if isinstance(value, str) and not isinstance(value, Unknown) and _NUMBER.fullmatch(value):
        return float(value)
    return value


def value_of(text: str) -> Any:
    """The value of an override's text (``Unknown`` if the shell would expand it)."""
    if "$" in text or "`" in text:
        return Unknown(text)
    try:
        return plain(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def flat(tree: Mapping[str, Any], parents: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings with its dotted key. An empty mapping is a leaf."""
    for key, value in tree.items():
        name = f"{parents}{key}"
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{name}.")
        else:
            yield name, plain(value)


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values with omegaconf's references (``${a.b}``) resolved, or ``Unknown``."""
    return {key: _resolved(value, given, _DEEPEST) for key, value in given.items()}


def _resolved(value: Any, given: Mapping[str, Any], depth: int) -> Any:
    if value == "???":
        return Unknown("???")
    if not isinstance(value, str) or "${" not in value:
        return value
    whole = _REFERENCE.fullmatch(value)
    if whole and depth:
        name, default = whole[1], whole[2]
        if name in given:
            return _resolved(given[name], given, depth - 1)
        return Unknown(value) if default is None else plain(yaml.safe_load(default))
    text = _REFERENCE.sub(lambda m: str(given.get(m[1], m.group())), value)
    return Unknown(text) if "${" in text else text


KIND, UPDATES = "train.algorithm.kind", "train.updates_per_step"
CORRECTION = "train.sampler_correction"
_FIELDS: Mapping[str, set[str]] = {
    kind_of(each): {*each.model_fields}
    for each in sections(TrainConfig.model_fields["algorithm"].annotation)
}


def whole_batch(updates: int) -> str:
    """A reason why a step of several updates overlaps little, or nothing for one update."""
    if updates == 1:
        return ""
    return (
        f"{updates} updates need the whole batch, so gradients cannot start during the rollout and "
        "exact gains little; 1 restores it, but changes what is learned"
    )


def fit(draft: Draft) -> None:
    """Remove the options that the algorithm does not have, and report the difference."""
    kind = draft.settings[KIND].value
    for path, setting in [*draft.settings.items()]:
        start, _, name = path.rpartition(".")
        if start != "train.algorithm" or name in _FIELDS[kind]:
            continue
        draft.drop(path, f"{kind} has no {name}")
        low = draft.settings["train.algorithm.epsilon"].value
        if name != "epsilon_high" or setting.value != low:
            draft.refuse(f"{kind} has no {name}", *setting.keys)


def differ(draft: Draft, hint: str, *keys: str, path: str = KIND) -> None:
    """Report a difference, even one by the framework's default."""
    draft.refuse(hint, *keys)
    if not any(key in draft.given for key in keys):
        draft.warnings.append(f"{path}: {hint} ({draft.origin(keys[0])})")


def correct(
    draft: Draft, kind: str, level: str, low: float, high: float, *keys: str, note: str = ""
) -> None:
    """Set importance weights between sampler and trainer, or leave them to be set by hand.

    The first of ``keys`` is the one for the kind, the last one that for the upper bound.
    """
    if any(key in draft.refused for key in keys):
        return
    for name, whole in (("top_p", 1.0), ("top_k", 0)):
        setting = draft.settings.get(f"rollout.{name}")
        if setting is not None and setting.value != whole:
            hint = f"weights need the whole softmax, but rollout.{name} cuts it"
            differ(draft, hint, *keys, path=f"{CORRECTION}.kind")
            return
    if not 0.0 <= low <= 1.0 <= high:
        draft.refuse("its bounds must contain 1, the ratio of equal probabilities", *keys)
        return
    draft.set(f"{CORRECTION}.kind", kind, *keys, note=note)
    draft.set(f"{CORRECTION}.level", level, *keys[:-1])
    if kind == "mask":
        draft.set(f"{CORRECTION}.low", low, *keys[1:])
    draft.set(f"{CORRECTION}.high", high, keys[-1])


def machines(draft: Draft, key: str) -> int:
    """The number of machines by ``key``. Several belong to a Ray cluster."""
    count = draft.number(key, 1)
    if count > 1:
        draft.set("devices.nodes", count, key)
        note = "the Ray cluster of the machine that starts the run"
        draft.set("cluster.address", "auto", key, note=note)
    return count


def warm_up(draft: Draft, count: int | None, key: str, note: str) -> None:
    """Set a number of warm-up updates (None if it is a share of an unknown number)."""
    if count is None:
        hint = "the number of steps is unknown: give --steps N, or set train.warmup_steps"
        draft.refuse(hint, key)
        return
    draft.set("train.warmup_steps", count, key, note=note)
    draft.set("train.warmup_from_zero", True, note=f"as in {draft.table.framework}")
