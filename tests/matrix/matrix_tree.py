"""The leaves of a configuration tree, by the names that the matrix uses.

``train.learning_rate`` is a key; ``rewards[].batch`` is a key of every element of a list;
``train.algorithm[dapo].overlong_buffer`` is a key of one member of a union. Where a key takes one
of some words, each word but the default is a leaf: ``rollout.tail_batching.mode=race``,
``train.algorithm.kind=dapo``, ``trackers=wandb``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollpacker.config import Config
from rollpacker.config.base import Key, choices, keys, kind_of

SAME, OWN = "eval.data.", ("eval.data.path",)
"""``DataConfig`` is read by the same code at both of its places, and tested at the first one; but
another file is read."""


def leaves(tree: type[Config]) -> list[str]:
    """Every leaf of a tree, in the order of its fields."""
    return [leaf for key in keys(tree) for leaf in _of_key(key)]


def _of_key(key: Key) -> list[str]:
    if key.path.startswith(SAME) and key.path not in OWN:
        return []
    field = key.field
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if key.sections:
        union = [each for each in key.sections if len(key.sections) > 1]
        return [f"{key.path}.kind={kind_of(each)}" for each in union if each is not type(default)]
    words = choices(field.annotation)
    return [f"{key.path}={word}" for word in words if word != default] if words else [key.path]


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
