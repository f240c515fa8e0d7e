"""The leaves of a configuration tree, by the names that the matrix uses.

``train.learning_rate`` is a key; ``rewards[].batch`` is a key of every element of a list;
``train.algorithm[dapo].overlong_buffer`` is a key of one member of a union. Where a key takes one
of some words, each word but the default is a leaf: ``rollout.tail_batching.mode=race``,
``train.algorithm.kind=dapo``, ``trackers=wandb``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from rollpacker.config import Config, DataConfig

SAME = {"eval.data": DataConfig}
"""Nodes whose class has its leaves elsewhere already, and is read by the same code: the first place
where the class stands (``data``) is the one that is tested. ``OWN`` are the exceptions."""

OWN = ("eval.data.path",)
"""Leaves below ``SAME`` that are leaves of their own: another file is read."""


def leaves(node: type[Config], prefix: str = "") -> list[str]:
    """Every leaf below a node, in the order of its fields."""
    return [
        leaf for name, field in node.model_fields.items() for leaf in _below(prefix + name, field)
    ]


def _below(path: str, field: Any) -> Iterator[str]:
    annotation = field.annotation
    members = _configs(annotation)
    if get_origin(annotation) is list and members:
        yield from leaves(members[0], f"{path}[].")
    elif len(members) > 1:
        default = type(field.get_default(call_default_factory=True))
        for member in members:
            if member is not default:
                yield f"{path}.kind={_kind(member)}"
        for member in members:
            yield from (
                leaf for leaf in leaves(member, f"{path}[{_kind(member)}].") if ".kind" not in leaf
            )
    elif members and path in SAME:
        yield from (leaf for leaf in leaves(members[0], f"{path}.") if leaf in OWN)
    elif members:
        yield from leaves(members[0], f"{path}.")
    else:
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield from (f"{path}={word}" for word in _words(annotation) if word != default)
        if not _words(annotation):
            yield path


def _configs(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, Config) else []
    return [found for part in get_args(annotation) for found in _configs(part)]


def _kind(member: type[Config]) -> str:
    return str(member.model_fields["kind"].default)


def _words(annotation: Any) -> tuple[Any, ...]:
    """What a key may be, where that is some words and nothing else."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return _words(get_args(annotation)[0]) if get_origin(annotation) is list else ()


def key_of(leaf: str) -> str:
    """The key that a leaf stands for, without its word and its member of a union."""
    key = leaf.partition("=")[0]
    while (start := key.find("[")) >= 0:
        end = key.index("]", start)
        key = key[:start] + (".*" if end == start + 1 else "") + key[end + 1 :]
    return key


def is_key_of(dotted: str, leaf: str) -> bool:
    """Whether ``dotted`` (``rewards.0.batch``) is a key of a leaf (``rewards[].batch``)."""
    parts, wanted = dotted.split("."), key_of(leaf).split(".")
    return len(parts) == len(wanted) and all(
        w in ("*", p) for p, w in zip(parts, wanted, strict=True)
    )


def is_set(config: Config, leaf: str) -> bool:
    """Whether a configuration has the word of a leaf, or something else than its default."""
    path, _, word = leaf.partition("=")
    name = path.rpartition(".")[2]
    for node in _nodes(config, path.split(".")[:-1]):
        value = getattr(node, name)
        field = type(node).model_fields[name]
        if isinstance(value, Config):
            value = getattr(value, "kind")  # noqa: B009
        elif not word and (
            field.is_required() or value != field.get_default(call_default_factory=True)
        ):
            return True
        if word and word in (value if isinstance(value, list) else [value]):
            return True
    return False


def _nodes(node: Any, path: list[str]) -> Iterator[Config]:
    if not path:
        yield node
        return
    name, _, member = path[0].rstrip("]").partition("[")
    value = getattr(node, name)
    if value is None:
        return
    for each in value if isinstance(value, list) else [value]:
        if not member or each.kind == member:
            yield from _nodes(each, path[1:])
