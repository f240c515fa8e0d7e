"""A flat table of a framework's keys: which of ours each becomes, or that it needs none.

What a file does not say has its framework's default, which is written down where ours differs. A
key that has no row, or whose value its row cannot say, is set by hand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, cast

import yaml

from rollpacker.config import TrainConfig
from rollpacker.config.base import kind_of, sections

HAND = object()
"""What a conversion returns where nothing of ours says the value; None where nothing need."""
_OFF = (False, 0, "", [], {})
_SAME = "the same happens here"
_NEEDS = {
    "eval.": "eval.data.path",
    "engine.gpu_memory": "engine.kind",
    "model.lora_alpha": "model.lora_rank",
    "train.kl_bias_correction": "train.beta",
    "rollout.dynamic_sampling.max_draws": "rollout.dynamic_sampling.enabled",
}
"""Keys of ours that say nothing without another, by how they begin."""
_LONGEST = 60
"""Characters of a value in a comment."""
BY_HAND = "set by hand: "


class Unknown(str):
    """A value that the file does not hold: a variable of the shell or an expression of Python."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What the command line says of the job; it goes before the file. See ``init``."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    held_out: str | None = None
    steps: int | None = None
    world: int | None = None

    def settings(self) -> dict[str, tuple[str, Any]]:
        """The option and its value, by the one of our keys that it sets."""
        given = {
            "model.path": ("--model", self.model),
            "data.path": ("--data", self.data),
            "rewards.0.function": ("--reward", self.reward),
            "eval.data.path": ("--eval-data", self.held_out),
            "steps": ("--steps", self.steps),
        }
        return {path: each for path, each in given.items() if each[1]}

    def replaced(self, path: str) -> str | None:
        """The option that goes before what a file would say of one of our keys."""
        group = path.partition(".")[0]
        path = {"rewards": "rewards.0.function", "epochs": "steps"}.get(group, path)
        for part in (".options.name", ".split"):
            path = path.replace(f"data{part}", "data.path")
        return self.settings().get(path, (None,))[0]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """What becomes of a key.

    Args:
        kind: ``set``, ``read`` by a joint rule, ``hand`` or ``nothing``.
        to: our key; its ``*`` is what that of the key stands for.
        value: turns its value into ours, ``HAND`` or None.
        default: the framework's.
        note: put into the comment; why it needs nothing, or what to set by hand.
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
    # A folder of its own: TRL's checkpoints have the same names as ours.
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
"""What the tables name."""


def _chosen(values: Mapping[Any, Any]) -> Callable[[Any], Any]:
    """One of our values by theirs; ``*`` is any other one."""

    def value(given: Any) -> Any:
        ours = values.get("*", HAND)
        ours = values.get(given, ours) if isinstance(given, str | int) else ours
        return given if ours == "*" else ours

    return value


def _row(to: str, how: Any = "same", default: Any = None, note: str = "") -> KeyRow:
    value = _chosen(cast(dict[Any, Any], how)) if isinstance(how, dict) else _CONVERSIONS[how]
    return KeyRow("set", to, value, default, note)


def _by_hand(hint: str, same: str) -> KeyRow:
    """``same`` are values that mean what happens here, such as ``true|1``."""
    off = tuple(yaml.safe_load(each) for each in same.split("|")) if same else ()
    # Where true is what happens here, it is false that differs.
    return KeyRow("hand", note=hint, off=off if "true" in same else (*_OFF, *off))


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of a framework; ``*`` in a key stands for anything. ``joints`` follow the rows."""

    framework: str
    rows: Mapping[str, KeyRow]
    joints: Sequence[Callable[[Draft], None]]

    @classmethod
    def load(cls, framework: str, joints: Sequence[Callable[[Draft], None]]) -> Table:
        """That of the file beside this one; ``verl.yaml`` says how it is written."""
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
        """The row of a key: its own, or that of the longest pattern."""
        if key in self.rows:
            return self.rows[key]
        fits = [pattern for pattern in self.rows if fnmatchcase(key, pattern)]
        return self.rows[max(fits, key=len)] if fits else None


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of ours, of which of their keys it is, and how."""

    value: Any
    why: str
    keys: tuple[str, ...] = ()


@dataclass(slots=True)
class Draft:
    """A job in the making, and what became of each key.

    Args:
        given: every key of ``file`` with its value; dotted where nested.
        asked: goes before the file.
        ignored: keys that do not matter here, with a word why.
        refused: keys that are set by hand, with a hint or nothing.
        warnings: to be checked first.
        text: of the job file.
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
        """Keys that are in a value of ours."""
        used = {key for setting in self.settings.values() for key in setting.keys}
        return [k for k in self.given if k in used and k not in self.refused]

    @property
    def by_hand(self) -> list[str]:
        """A line for each key that is set by hand, with its value."""
        return [
            f"{BY_HAND}{key} ({said(self.given[key])}){hint and f': {hint}'}"
            for key, hint in self.refused.items()
        ]

    def has(self, key: str) -> bool:
        """Whether the file says a value of it."""
        value = self.given.get(key)
        return value is not None and not isinstance(value, Unknown)

    def get(self, key: str) -> Any:
        """The value of a key; where it is not given or null, the framework's default."""
        row = self.table.row(key)
        return self.given[key] if self.has(key) else row.default if row else None

    def first(self, *keys: str) -> str:
        """The first of several names that is given, else the first."""
        return next((key for key in keys if self.has(key)), keys[0])

    def number(self, key: str, least: int | None = None) -> int:
        """The whole number of a key, which is ``least`` or more. Raises ``ValueError``."""
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
        """Ours of a value that makes another job where it is none of these: ``ValueError``."""
        if str(self.get(key)) not in values:
            raise ValueError(
                f"{self.file}: {self.origin(key)} has no counterpart: rollpacker has "
                f"{', '.join(values)}"
            )
        return values[str(self.get(key))]

    def origin(self, key: str) -> str:
        """``key=value`` as the file has it, or the framework's default."""
        default = "" if self.has(key) else f"{self.table.framework}'s default "
        return f"{default}{key}={said(self.get(key))}"

    def set(self, path: str, value: Any, *keys: str, note: str = "") -> None:
        """Write one of our keys, dotted, which is made of ``keys``; an option goes before it."""
        option = self.asked.replaced(path)
        if option:
            for key in keys:
                self.refused.pop(key, None)
            self.ignore(f"{option} is taken instead", *keys)
            return
        why = ", ".join(map(self.origin, keys))
        note = f": {note}" if why and note else note
        self.settings[path] = Setting(value, f"{why}{note}", keys)

    def drop(self, path: str, why: str) -> None:
        """Take one of our keys back, unless an option of the command line has set it."""
        if path in self.settings and not self.asked.replaced(path):
            self.ignore(why, *self.settings.pop(path).keys)

    def ignore(self, why: str, *keys: str) -> None:
        """Say of those keys that are given why they do not matter here."""
        self.ignored |= {key: why for key in keys if key in self.given}

    def refuse(self, hint: str, *keys: str) -> None:
        """Leave those keys that are given to be set by hand."""
        self.refused |= {key: hint for key in keys if key in self.given}


def said(value: Any) -> str:
    """A value in a comment: short, on one line, as YAML writes it."""
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
    """Translate every key of a draft: afterwards each is translated, ignored or set by hand."""
    for key, value in draft.given.items():
        row = draft.table.row(key)
        if isinstance(value, Unknown) and (row is None or row.kind != "nothing"):
            draft.refuse("the file does not hold its value", key)
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
    """Keys with one counterpart; of two names of a value the table's first goes before."""
    rows = {pattern: row for pattern, row in draft.table.rows.items() if row.to}
    for pattern, row in rows.items():
        for key in [each for each in draft.given if fnmatchcase(each, pattern)]:
            _set(draft, key, row, row.to.replace("*", key.removeprefix(pattern.rstrip("*"))))
    # The default is none where the file says something else.
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
        say(f"{winner.keys[0]} goes before", key)
    elif ours is not None:
        draft.set(path, ours, key, note=row.note)


def _prune(draft: Draft) -> None:
    """Take out what says nothing, because what it belongs to is not there."""
    for path in [*draft.settings]:
        for start, needed in _NEEDS.items():
            if path.startswith(start) and needed not in draft.settings:
                draft.drop(path, f"there is no {needed}")


def _judge(draft: Draft, key: str, row: KeyRow | None) -> None:
    """A key that nothing of ours has been made of."""
    value = draft.given[key]
    if row is None:
        draft.refuse("", key)
    elif value is None:
        draft.ignore("null is the default", key)
    elif row.kind == "hand" and value not in row.off:
        draft.refuse(row.note, key)
    else:
        draft.ignore(row.note if row.kind == "nothing" else _SAME, key)


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+")
"""YAML 1.1 reads ``1e-6`` as text; hydra and transformers read a number."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*([^${}]*))?\}")
_DEEPEST = 5
"""References to references."""


def plain(value: Any) -> Any:
    """A value with its numbers as numbers, in lists too."""
    if isinstance(value, list):
        return [plain(each) for each in cast(list[Any], value)]
    if isinstance(value, str) and not isinstance(value, Unknown) and _NUMBER.fullmatch(value):
        return float(value)
    return value


def value_of(text: str) -> Any:
    """The value of an override's text; ``Unknown`` where the shell would have put something in."""
    if "$" in text or "`" in text:
        return Unknown(text)
    try:
        return plain(yaml.safe_load(text))
    except yaml.YAMLError:
        return text


def flat(tree: Mapping[str, Any], parents: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings with its dotted key; an empty mapping is a leaf."""
    for key, value in tree.items():
        name = f"{parents}{key}"
        if isinstance(value, dict) and value:
            yield from flat(cast(dict[str, Any], value), f"{name}.")
        else:
            yield name, plain(value)


def resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """Values with omegaconf's references (``${a.b}``) put in; ``Unknown`` where there is none."""
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


def fit(draft: Draft) -> None:
    """Take out the options that the algorithm has not got, and say what is missed by it."""
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
    """Something that is done otherwise here, if only by the framework's default."""
    draft.refuse(hint, *keys)
    if not any(key in draft.given for key in keys):
        draft.warnings.append(f"{path}: {hint}; {draft.origin(keys[0])}")


def correct(
    draft: Draft, kind: str, level: str, low: float, high: float, *keys: str, note: str = ""
) -> None:
    """Importance weights between sampler and trainer: what is asked for by ``keys``, the one of its
    kind first, the one of its upper bound last; by hand where that cannot be."""
    if any(key in draft.refused for key in keys):
        return
    for name, whole in (("top_p", 1.0), ("top_k", 0)):
        setting = draft.settings.get(f"rollout.{name}")
        if setting is not None and setting.value != whole:
            hint = f"weights need the whole softmax, rollout.{name} cuts it"
            differ(draft, hint, *keys, path=f"{CORRECTION}.kind")
            return
    if not 0.0 <= low <= 1.0 <= high:
        draft.refuse("its bounds have 1 between them: ratios that agree are 1", *keys)
        return
    draft.set(f"{CORRECTION}.kind", kind, *keys, note=note)
    draft.set(f"{CORRECTION}.level", level, *keys[:-1])
    if kind == "mask":
        draft.set(f"{CORRECTION}.low", low, *keys[1:])
    draft.set(f"{CORRECTION}.high", high, keys[-1])


def machines(draft: Draft, key: str) -> int:
    """How many, by ``key``; several are of a Ray cluster."""
    count = draft.number(key, 1)
    if count > 1:
        draft.set("devices.nodes", count, key)
        note = "the Ray cluster of which the machine that starts the run is a part"
        draft.set("cluster.address", "auto", key, note=note)
    return count


def warm_up(draft: Draft, count: int | None, key: str, note: str) -> None:
    """A number of updates; None where the file does not say of how many it is a share."""
    if count is None:
        hint = "how many steps there will be is not known: --steps N, or train.warmup_steps"
        draft.refuse(hint, key)
        return
    draft.set("train.warmup_steps", count, key, note=note)
    draft.set("train.warmup_from_zero", True, note=f"as in {draft.table.framework}")
