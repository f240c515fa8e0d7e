"""Translates another framework's configuration to a job file: ``rollpacker init --from``.

It starts no run and does not need the other framework.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from rollpacker.cli.convert import script, trl, verl
from rollpacker.cli.convert.table import (
    BY_HAND,
    CommandLine,
    Draft,
    Setting,
    Table,
    fill,
    flat,
    plain,
    resolved,
    said,
)
from rollpacker.config import ConfigError, RunConfig, parse
from rollpacker.config.reading import SCRIPTS

__all__ = ["CommandLine", "Draft", "translate"]

_NEEDED = {"model.path": "--model", "data.path": "--data", "rewards.0.function": "--reward"}
_COMPARE = ("grpo", "dr_grpo", "dapo", "rloo", "gspo")
"""Algorithms that compare the responses of a prompt."""
_OURS = ("rewards", "rollout")
_PLAIN = re.compile(r"[\w~/.@:+*-]*")
_LINE = 100
_COLUMN = 40


def translate(file: Path, asked: CommandLine) -> Draft:
    """The job of a verl or TRL configuration, with its ``text``.

    Raises ``ValueError`` if the file is not such a configuration, trains with an unknown algorithm,
    or names no model, data or reward that ``asked`` lacks too.
    """
    table, given, warnings = _read(file)
    draft = Draft(table, str(file), given, asked, warnings=warnings)
    fill(draft)
    missing = [flag for path, flag in _NEEDED.items() if path not in draft.settings]
    if missing:
        raise ValueError(f"{file} does not define the whole job: give {', '.join(missing)}")
    _check_group(draft)
    draft.text = render(draft)
    try:
        parse(yaml.safe_load(draft.text), str(file))
    except ConfigError as error:
        raise ValueError(f"{error} (translated from {table.framework}'s keys)") from None
    return draft


def _check_group(draft: Draft) -> None:
    """Warn of one response per prompt, a default of some frameworks that train refuses."""
    count = draft.settings.get("rollout.num_generations")
    kind = draft.settings.get("train.algorithm.kind", Setting("grpo", "")).value
    if count is not None and count.value == 1 and kind in _COMPARE:
        draft.warnings.insert(
            0,
            f"rollout.num_generations: {count.why} trains nothing with {kind}, which compares the "
            "responses of a prompt: set 2 or more, such as 8",
        )


def _read(file: Path) -> tuple[Table, dict[str, Any], list[str]]:
    if not file.is_file():
        raise ValueError(f"--from {file}: no such file")
    if file.suffix == ".py":
        given, warnings = script.keywords(file)
        return trl.table(), given, warnings
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"--from {file}: not text") from None
    if file.suffix in SCRIPTS or text.startswith("#!"):
        return _launched(file, text)
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--from {file}: not YAML: {' '.join(str(error).split())}") from None
    return _configured(file, cast(dict[str, Any], tree) if isinstance(tree, dict) else {})


def _launched(file: Path, text: str) -> tuple[Table, dict[str, Any], list[str]]:
    try:
        given = script.overrides(text)
    except ValueError as error:
        raise ValueError(f"--from {file}: cannot be read as a shell script: {error}") from None
    if not any(key.startswith("actor_rollout_ref.") for key in given):
        raise ValueError(
            f"--from {file}: no verl overrides (actor_rollout_ref.model.path=...) in this script. "
            "For TRL, give the file of --config or the Python script"
        )
    branches = any(line.split()[:1] in (["if"], ["case"]) for line in text.splitlines())
    warning = "the script has branches, which are not followed: the last value of a key counts"
    return verl.table(), given, [warning] * branches


def _configured(file: Path, tree: dict[str, Any]) -> tuple[Table, dict[str, Any], list[str]]:
    keys = [str(key) for key in tree]
    if all(key in keys for key in _OURS):
        raise ValueError(f"--from {file}: it is a job file already: rollpacker train {file}")
    sections = [key for key in verl.MARKS if isinstance(tree.get(key), dict)]
    if "actor_rollout_ref" in sections or len(sections) > 1:
        leaves = {k: v for k, v in flat(tree) if not k.endswith("_target_")}
        return verl.table(), resolved(leaves), []
    if any(key in keys for key in trl.MARKS):
        return trl.table(), {str(key): plain(value) for key, value in tree.items()}, []
    found = ", ".join(keys[:5]) or "nothing"
    raise ValueError(
        f"--from {file}: not a configuration of verl (actor_rollout_ref, ...) or of TRL's GRPO "
        f"({', '.join(trl.MARKS[:3:2])}, ...): it has {found}"
    )


def render(draft: Draft) -> str:
    """The job file as YAML, with the origin of each value and the keys that were left out."""
    lines = [
        f"# Translated from {_printed(draft.file)} ({draft.table.framework}) by: "
        "rollpacker init --from",
        "# Each value has its origin behind it. Keys without a counterpart are at the end.",
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
        lines += ["", "# Ignored: these do not change the training here"]
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
    if isinstance(value, list):
        return f"[{', '.join(_value(each) for each in cast(list[Any], value))}]"
    if isinstance(value, dict):
        parts = cast(dict[Any, Any], value).items()
        return f"{{{', '.join(f'{_value(key)}: {_value(each)}' for key, each in parts)}}}"
    # In lists a comma, and everywhere a line break, would end a text without quotes.
    style = '"' if isinstance(value, str) and not _PLAIN.fullmatch(value) else None
    text = yaml.safe_dump(value, default_style=style, width=10**9, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _printed(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in " ".join(text.split()))


def _reasons(draft: Draft, keys: Mapping[str, str]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for key, why in keys.items():
        by_reason.setdefault(why, []).append(f"{key}={said(draft.given[key])}")
    for why, those in by_reason.items():
        yield from (f"#   {_printed(each)}" for each in those)
        yield from _wrapped("#       ", [why])


def _wrapped(prefix: str, texts: list[str]) -> Iterator[str]:
    for text in texts:
        line = prefix
        for word in _printed(text).split():
            if len(line) + len(word) > _LINE and line.strip("# "):
                yield line.rstrip()
                line = "#" + " " * (len(prefix) - 1)
            line += f"{word} "
        yield line.rstrip()
