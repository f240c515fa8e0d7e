"""The base of every node of a configuration, and the walk over a tree of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo


def only_here(path: str) -> bool:
    """Whether a path cannot be a hub name, which has at most one slash."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


ROUTED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token")
"""Keys of model configurations that hold the number of experts per token."""


OnResume = Literal["free", "rounding", "logged", "refused"]
"""The effect of a key's changed value on a resumed run."""
MEANING: Mapping[OnResume, str] = {
    "free": "may change: samples and updates stay what they would have been",
    "rounding": "may change, and a log line names the key: results then differ by rounding. In "
    "modes that race, the speed of responses (and so `grading.workers`) also decides the winners",
    "logged": "may change, and a log line names the key: the run learns differently from that step "
    "on (by `steps` and `epochs` only if `train.lr_scheduler_type` is not `constant`)",
    "refused": "must not change: it would be another run",
}


@dataclass(frozen=True, slots=True)
class Resumed:
    """The class of a key, in the metadata of its field."""

    kind: OnResume


_T = TypeVar("_T")
Free = Annotated[_T, Resumed("free")]
Rounding = Annotated[_T, Resumed("rounding")]
Logged = Annotated[_T, Resumed("logged")]
Fixed = Annotated[_T, Resumed("refused")]


class Config(BaseModel):
    """Base of every node. Nodes are frozen, and refuse unknown keys, infinities and NaN."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_off(cls, data: Any) -> Any:
        """Read false as ``off`` if that is a choice, because YAML 1.1 reads a bare ``off`` as
        false."""
        if not isinstance(data, dict):
            return data
        tree = cast(dict[str, Any], data)
        plain = [key for key, value in tree.items() if value is False and cls._may_be_off(key)]
        return tree | dict.fromkeys(plain, "off")

    @classmethod
    def _may_be_off(cls, key: str) -> bool:
        field = cls.model_fields.get(key)
        return field is not None and "off" in choices(field.annotation)


def usual_kind(kind: str) -> BeforeValidator:
    """Let users leave out ``kind`` in a union: it is that of the default."""

    def complete(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {"kind": kind} | cast(dict[str, Any], value)

    return BeforeValidator(complete)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a tree of models.

    Args:
        path: dotted, with ``[]`` behind a list and ``[KIND]`` behind a union of several models.
        model: the model that has the field.
        sections: the models that the value may be. Empty for a leaf.
    """

    path: str
    model: type[Config]
    field: FieldInfo
    sections: list[type[Config]]


def keys(tree: type[Config], path: str = "") -> Iterator[Key]:
    """Yield every key below a model, a section before its own keys."""
    for name, field in tree.model_fields.items():
        found = sections(field.annotation)
        yield Key(f"{path}{name}", tree, field, found)
        for each in found:
            union = f"[{kind_of(each)}]" if len(found) > 1 else ""
            mark = "[]" if get_origin(field.annotation) is list else union
            yield from keys(each, f"{path}{name}{mark}.")


def choices(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a ``Literal``, or of the literals in a union."""
    parts = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
    return tuple(value for part in parts for value in get_args(part))


def sections(annotation: Any) -> list[type[Config]]:
    """Return the models that a value may be."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections(part)]


def kind_of(model: type[Config]) -> str:
    """Return the kind of a union's member. Empty for a model that has none or several."""
    field = model.model_fields.get("kind")
    kinds = () if field is None else get_args(field.annotation)
    return kinds[0] if len(kinds) == 1 else ""
