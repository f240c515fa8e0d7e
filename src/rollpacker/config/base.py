"""What every node of a configuration has in common, and the walk over a tree of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator
from pydantic.fields import FieldInfo


def only_here(path: str) -> bool:
    """Whether it cannot be a name on the hub, which has one slash at most."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1


ROUTED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "num_experts_per_token")
"""How many experts a token goes to."""


OnResume = Literal["free", "last bits", "said", "refused"]
"""What becomes of a run that goes on with another value of a key."""
MEANING: Mapping[OnResume, str] = {
    "free": "may change: samples and updates stay what they would have been",
    "last bits": "may change, and a line names the key: the same is sampled and summed but for the "
    "last bits; in modes that race, how fast responses end (`grading.workers` too) also decides "
    "which of them win",
    "said": "may change, and a line names the key: what is learned from there on is another (by "
    "`steps` and `epochs` only where `train.lr_scheduler_type` is not `constant`)",
    "refused": "would be another run",
}


@dataclass(frozen=True, slots=True)
class Resumed:
    """The class of a key, in the metadata of its field."""

    kind: OnResume


_T = TypeVar("_T")
Free = Annotated[_T, Resumed("free")]
LastBits = Annotated[_T, Resumed("last bits")]
Said = Annotated[_T, Resumed("said")]
Fixed = Annotated[_T, Resumed("refused")]


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
        return field is not None and "off" in choices(field.annotation)


def usual_kind(kind: str) -> BeforeValidator:
    """Of a union, the member that is meant where ``kind`` is left out: that of the default, so that
    one of its keys can be set alone."""

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
        model: what it is a field of.
        field: its field.
        sections: the models that its value may be; empty for a leaf.
    """

    path: str
    model: type[Config]
    field: FieldInfo
    sections: list[type[Config]]


def keys(tree: type[Config], path: str = "") -> Iterator[Key]:
    """Every key below a model, a section before its own."""
    for name, field in tree.model_fields.items():
        found = sections(field.annotation)
        yield Key(f"{path}{name}", tree, field, found)
        for each in found:
            union = f"[{kind_of(each)}]" if len(found) > 1 else ""
            mark = "[]" if get_origin(field.annotation) is list else union
            yield from keys(each, f"{path}{name}{mark}.")


def choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a ``Literal``, also where another type may stand in its place."""
    parts = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
    return tuple(value for part in parts for value in get_args(part))


def sections(annotation: Any) -> list[type[Config]]:
    """The models that a value may be."""
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [found for part in get_args(annotation) for found in sections(part)]


def kind_of(model: type[Config]) -> str:
    """The kind of a member of a union; empty for a model that has none or several."""
    field = model.model_fields.get("kind")
    kinds = () if field is None else get_args(field.annotation)
    return kinds[0] if len(kinds) == 1 else ""
