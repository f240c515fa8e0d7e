"""Whose environment something is, by the methods that it has."""

from __future__ import annotations

import inspect
from typing import Any, Literal

Kind = Literal["ours", "trl", "openenv", "skyrl", "gym"]

_FREE = {"seed", "options"}
"""What ``reset`` of gem and Gymnasium can be given."""
_ANY = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)


def kind_of(target: Any) -> Kind | None:
    """The kind of a class or an object; None where it is no environment that is known."""
    if _has(target, "init", "step") and not _has(target, "reset"):
        return "skyrl"
    if _has(target, "reset", "step", "_step_payload"):
        return "openenv"
    if not _has(target, "reset"):
        return None
    if _has(target, "get_reward") or not _has(target, "step"):
        return "trl"
    return "gym" if _free(target) else "ours"


def _has(target: Any, *methods: str) -> bool:
    return all(callable(getattr(target, method, None)) for method in methods)


def _free(target: Any) -> bool:
    """Whether it is begun without a row."""
    parameters = list(inspect.signature(target.reset).parameters.values())
    if inspect.isclass(target):
        parameters = parameters[1:]
    return all(each.name in _FREE or each.kind in _ANY for each in parameters)
