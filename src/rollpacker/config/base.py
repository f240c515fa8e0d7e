"""What every node of a configuration has in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class Config(BaseModel):
    """Base of every node: frozen, no unknown keys, no number without end."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_off(cls, data: Any) -> Any:
        """YAML 1.1 reads a bare ``off`` as false, which is meant where ``off`` is a choice."""
        if not isinstance(data, dict):
            return data
        tree = cast(dict[str, Any], data)
        plain = [key for key, value in tree.items() if value is False and cls._may_be_off(key)]
        return tree | dict.fromkeys(plain, "off")

    @classmethod
    def _may_be_off(cls, key: str) -> bool:
        field = cls.model_fields.get(key)
        if field is None or get_origin(field.annotation) is not Literal:
            return False
        return "off" in get_args(field.annotation)


def usual_kind(kind: str) -> BeforeValidator:
    """Of a union, the member that is meant where ``kind`` is left out: that of the default, so that
    one of its keys can be set alone."""

    def complete(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {"kind": kind} | cast(dict[str, Any], value)

    return BeforeValidator(complete)


def fields_of(kind: type[Any], texts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Those of a dataclass, for pydantic's ``create_model``; ``texts`` describe them by name."""
    hints, found = get_type_hints(kind), dict[str, Any]()
    for each in fields(kind):
        said: dict[str, Any] = {"description": (texts or {}).get(each.name)}
        if each.default_factory is not MISSING:
            field = Field(default_factory=each.default_factory, **said)
        else:
            default: Any = ... if each.default is MISSING else each.default
            field = Field(default, **said)
        found[each.name] = (hints[each.name], field)
    return found
