"""Functions as tools: their JSON schemas, and arguments checked against them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from rollpacker.env.calls.values import wanted
from rollpacker.errors import words_of

Schema = dict[str, Any]


def schema_of(function: Callable[..., Any], where: str) -> Schema:
    """The schema of a function with type hints and a docstring that describes its arguments.

    Raises ``ValueError`` that begins with ``where`` and says what it lacks.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if inspect.isclass(function):
        raise ValueError(f"{where}: {name} is a class: a tool is a function")
    unnamed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    any_name = inspect.Parameter.VAR_KEYWORD
    try:
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind in unnamed or parameter.kind is any_name:
                raise ValueError(f"its argument {parameter.name} cannot be given by name")
        return get_json_schema(function)
    except Exception as error:  # of several kinds, and hints may be of any code
        raise ValueError(f"{where}: {name} cannot be a tool: {words_of(error)}") from error


def mistake(schema: Schema, arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, for the model; None if nothing is."""
    parameters = schema["function"]["parameters"]
    known: dict[str, Any] = parameters.get("properties", {})
    for name in arguments:
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            return f"there is no argument {name!r:.100}: {takes}"
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        should = wanted(known[name], value)
        if should is not None:
            return f"the argument {name!r} must be {should}"
    return None
