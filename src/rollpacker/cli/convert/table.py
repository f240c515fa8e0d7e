"""What becomes of every key of another framework's configuration: rules, and what they wrote.

A key is copied, used in a computation with others, ignored or refused; none is left out. What a
file does not say has its framework's default, which is written down where ours differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

UNSET = object()
_SAME = "the same happens here"
_LONGEST = 60
"""Characters of a value in a comment."""


class Unknown(str):
    """A value that the file does not hold: a variable of the shell or an expression of Python."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says of the job; it goes before the file. See ``init``."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    held_out: str | None = None
    steps: int | None = None
    world: int | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """A key that has one of ours as its counterpart.

    Args:
        to: our key.
        note: put into the comment.
        default: the framework's default, where it is not ours.
        value: what turns its value into ours.
    """

    to: str
    note: str = ""
    default: Any = UNSET
    value: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Ignore:
    """A key that does not matter here."""

    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """A key without a counterpart, but for values that mean what happens here anyway."""

    why: str
    unless: tuple[Any, ...] = (False, 0)


@dataclass(frozen=True, slots=True)
class Joint:
    """Keys whose values together become some of ours; ``fill`` may ignore or refuse some."""

    keys: tuple[str, ...]
    fill: Callable[[Draft], None]


Rule = Copy | Ignore | Refuse


@dataclass(frozen=True, slots=True)
class Table:
    """All rules of a framework; ``*`` in a key of ``rules`` stands for anything."""

    framework: str
    rules: Mapping[str, Rule]
    joints: Sequence[Joint]

    def rule(self, key: str) -> Rule | None:
        """The rule of a key: its own, or that of the longest pattern."""
        if key in self.rules:
            return self.rules[key]
        fits = [pattern for pattern in self.rules if fnmatchcase(key, pattern)]
        return self.rules[max(fits, key=len)] if fits else None


@dataclass(frozen=True, slots=True)
class Setting:
    """A value of ours, and where it comes from."""

    value: Any
    why: str


@dataclass(slots=True)
class Draft:
    """A job in the making, and what became of each key.

    Args:
        framework: its name, for comments.
        file: what is translated.
        given: every key with its value; dotted where nested.
        asked: what goes before it.
    """

    framework: str
    file: str
    given: dict[str, Any]
    asked: Asked
    settings: dict[str, Setting] = field(default_factory=dict)
    translated: list[str] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or its default where it is not given or null."""
        value = self.given.get(key)
        return default if value is None or isinstance(value, Unknown) else value

    def first(self, *keys: str, default: Any = None) -> tuple[str, Any]:
        """The first of several names that is given, and its value; else the first name and the
        default."""
        for key in keys:
            if self.get(key) is not None:
                return key, self.get(key)
        return keys[0], default

    def number(self, key: str, default: int, least: int | None = None) -> int:
        """The whole number of a key, which is ``least`` or more. Raises ``ValueError``."""
        return self.whole(key, self.get(key, default), least)

    def whole(self, key: str, value: Any, least: int | None = None) -> int:
        """``value`` as a whole number. Raises ``ValueError`` that names the key."""
        number = self._checked(key, value)
        if number != int(number) or (least is not None and number < least):
            from_ = "" if least is None else f" from {least} on"
            raise ValueError(f"{self.file}: {key}={said(value)}: expected a whole number{from_}")
        return int(number)

    def real(self, key: str, default: float) -> float:
        """The number of a key. Raises ``ValueError``."""
        return self._checked(key, self.get(key, default))

    def _checked(self, key: str, value: Any) -> float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            raise ValueError(f"{self.file}: {key}={said(value)}: expected a number")
        return value

    def origin(self, key: str, default: Any = UNSET) -> str:
        """``key=value`` as the file has it, or the framework's default."""
        if self.get(key) is not None:
            return f"{key}={said(self.get(key))}"
        if default is UNSET:
            return f"{self.framework}'s default of {key}"
        return f"{self.framework}'s default {key}={said(default)}"

    def set(self, path: str, value: Any, why: str) -> None:
        """Write one of our keys, dotted, with the origin of its value."""
        self.settings[path] = Setting(value, why)

    def ignore(self, why: str, *keys: str) -> None:
        """Say of those keys that are given why they do not matter here."""
        for key in keys:
            if key in self.given and key not in self.refused:
                self.ignored.setdefault(key, why)

    def replace(self, option: str, *keys: str) -> None:
        """Say of those keys that are given that an option of the command line goes before."""
        for key in keys:
            self.refused.pop(key, None)
        self.ignore(f"{option} is taken instead", *keys)

    def lost(self, winner: str, *names: str) -> None:
        """Say of the other names of a value that ``winner``, which is given, goes before."""
        for name in names:
            if name != winner and self.get(name) is not None:
                say = self.ignore if self.get(name) == self.get(winner) else self.refuse
                say(f"{winner} goes before", name)

    def refuse(self, why: str, *keys: str) -> None:
        """Say of those keys that are given what they do that nothing here does."""
        for key in keys:
            if key in self.given:
                self.ignored.pop(key, None)
                self.refused.setdefault(key, why)

    def no_counterpart(self, key: str, default: Any, choices: str) -> ValueError:
        """What makes another job of this one."""
        return ValueError(
            f"{self.file}: {self.origin(key, default)} has no counterpart: rollpacker has {choices}"
        )


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


def fill(table: Table, draft: Draft) -> None:
    """Translate every key of a draft: afterwards each is translated, ignored or refused."""
    used = {key for joint in table.joints for key in joint.keys}
    for key, value in draft.given.items():
        matters = key in used or not isinstance(table.rule(key), Ignore)
        if matters and isinstance(value, Unknown):
            draft.refuse("the file does not hold its value: set it by hand", key)
    for joint in table.joints:
        joint.fill(draft)
    for key, rule in table.rules.items():
        if isinstance(rule, Copy) and (draft.get(key) is not None or rule.default is not UNSET):
            _copy(draft, key, rule)
    origins = " ".join(setting.why for setting in draft.settings.values())
    for key in [k for k in draft.given if k not in draft.refused and k not in draft.ignored]:
        if re.search(rf"(?<![\w.]){re.escape(key)}=", origins):
            draft.translated.append(key)
        else:
            _judge(draft, key, Ignore(_SAME) if key in used else table.rule(key))


def _copy(draft: Draft, key: str, rule: Copy) -> None:
    value = draft.get(key, rule.default)
    if key in draft.ignored or key in draft.refused or rule.to in draft.settings:
        return
    note = f": {rule.note}" if rule.note else ""
    draft.set(
        rule.to,
        rule.value(value) if rule.value else value,
        draft.origin(key, rule.default) + note,
    )


def _judge(draft: Draft, key: str, rule: Rule | None) -> None:
    """A key that nothing of ours has been made of."""
    value = draft.given[key]
    if value is None:
        draft.ignore("null is the default", key)
    elif isinstance(rule, Ignore):
        draft.ignore(rule.why, key)
    elif isinstance(rule, Refuse):
        if value in rule.unless:
            draft.ignore(_SAME, key)
        else:
            draft.refuse(rule.why, key)
    else:
        draft.refuse("unknown to rollpacker: it may change results", key)
