"""A draft as a job file: YAML with the origin of each value behind it, and what was left out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import yaml

from rollpacker.cli.convert.table import BY_HAND, Draft, Setting, said
from rollpacker.config import RunConfig

_PLAIN = re.compile(r"[\w~/.@:+*-]*")
_LINE = 100
_COLUMN = 40
"""Where comments begin, where the value leaves room."""


def render(draft: Draft) -> str:
    """The whole text of a job file."""
    lines = [
        f"# Translated from {_printed(draft.file)} ({draft.table.framework}) by: "
        "rollpacker init --from",
        "# Behind each value stands what it was made of; what has no place here is at the end.",
        "# Every key, with its default: docs/config.md",
        *_wrapped("# CHECK: ", draft.warnings),
    ]
    for name in sorted(tree := _tree(draft.settings), key=[*RunConfig.model_fields].index):
        lines += [""] * isinstance(tree[name], dict)
        lines += _node(name, tree[name], 0)
    if draft.refused:
        lines += ["", "# Set by hand: the run differs in these"]
        lines += _wrapped("#   ", [line.removeprefix(BY_HAND) for line in draft.by_hand])
    if draft.ignored:
        lines += ["", "# Ignored: these do not change what is learned here"]
        lines += _reasons(draft, draft.ignored)
    return "\n".join(lines) + "\n"


def _tree(settings: Mapping[str, Setting]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, setting in sorted(settings.items(), key=lambda each: not each[0].endswith(".kind")):
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = setting
    return tree


def _node(name: str, node: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, Setting):
        text = f"{indent}{_value(name)}: {_value(node.value)}"
        yield f"{text:<{_COLUMN}}  # {_printed(node.why)}"
        return
    yield f"{indent}{_value(name)}:"
    children = cast(dict[str, Any], node)
    if all(key.isdigit() for key in children):
        for each in children.values():
            inner = [line for key, value in each.items() for line in _node(key, value, depth + 2)]
            yield f"{indent}  - {inner[0].lstrip()}"
            yield from inner[1:]
        return
    for key, child in children.items():
        yield from _node(key, child, depth + 1)


def _value(value: Any) -> str:
    """As YAML on one line."""
    if isinstance(value, list):
        return f"[{', '.join(_value(each) for each in cast(list[Any], value))}]"
    if isinstance(value, dict):
        parts = cast(dict[Any, Any], value).items()
        return f"{{{', '.join(f'{_value(key)}: {_value(each)}' for key, each in parts)}}}"
    # In a list a comma, and anywhere a line break, would end a text that is not in quotes.
    style = '"' if isinstance(value, str) and not _PLAIN.fullmatch(value) else None
    text = yaml.safe_dump(value, default_style=style, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _printed(text: str) -> str:
    """As one line of a comment, without what YAML does not take."""
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


def _reasons(draft: Draft, keys: Mapping[str, str]) -> Iterator[str]:
    """Each reason once, with its keys."""
    by_reason: dict[str, list[str]] = {}
    for key, why in keys.items():
        by_reason.setdefault(why, []).append(f"{key}={said(draft.given[key])}")
    for why, those in by_reason.items():
        yield from (f"#   {_printed(each)}" for each in those)
        yield from _wrapped("#       ", [why])


def _wrapped(prefix: str, texts: list[str]) -> Iterator[str]:
    """Comment lines of bounded length."""
    for text in texts:
        line = prefix
        for word in _printed(text).split():
            if len(line) + len(word) > _LINE and line.strip("# "):
                yield line.rstrip()
                line = "#" + " " * (len(prefix) - 1)
            line += f"{word} "
        yield line.rstrip()
