"""What every node of a configuration has in common."""

from __future__ import annotations

from typing import Any, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Config(BaseModel):
    """Base of every node: frozen, no unknown keys, no number without end."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


def usual_kind(kind: str) -> BeforeValidator:
    """Of a union, the member that is meant where ``kind`` is left out: that of the default, so that
    one of its keys can be set alone."""

    def complete(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {"kind": kind} | cast(dict[str, Any], value)

    return BeforeValidator(complete)
