"""Reads settings from launch scripts and TRL's Python scripts without running them."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rollpacker.cli.convert.table import Unknown, plain, value_of

_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COMMAND = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_PLAIN = re.compile(r"\$\{(\w+)\}|\$(\w+)|\$\{(\w+)\[@\]\}")
_DEFAULT = re.compile(r"\$\{(\w+):?-([^${}]*)\}")
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w@]*(?:\.[\w@-]+)+)=(.*)", re.DOTALL)
_FOUND_OUT = {"HOME": "~", "PWD": "."}  # variables that every shell has, as paths
_ROUNDS = 8  # deepest nesting of variables in variables
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}


def overrides(text: str) -> dict[str, object]:
    """Each override with its last value.

    The script's own variables are expanded, and its branches are not followed. Values from the
    environment or from commands are ``Unknown``. Raises ``ValueError`` on open quotes.
    """
    text = re.sub(r"\\[ \t]*(\r?\n|$)", " ", text)
    text = _COMMAND.sub(lambda m: re.sub(r"\s+", "_", m.group()), _ARITHMETIC.sub(_closed, text))
    variables: dict[str, str] = dict(_FOUND_OUT)
    found: dict[str, object] = {}
    for word in _words(shlex.split(text, comments=True), variables):
        override = _OVERRIDE.fullmatch(word)
        if override:
            found[override[1]] = value_of(_expanded(override[2], variables))
            continue
        assigned = _ASSIGNED.fullmatch(word)
        if assigned:
            value = _expanded(assigned[2], variables)
            # A variable set from itself (X=$X) has no value here, and its expansion would never
            # end.
            if not re.search(rf"\$\{{?{assigned[1]}\b", value):
                variables[assigned[1]] = value
    return found


def _closed(found: re.Match[str]) -> str:
    return re.sub(r"\s+", "", found.group())


def _words(words: list[str], variables: dict[str, str]) -> Iterator[str]:
    """Split variables and arrays that contain several words."""
    array: tuple[str, list[str]] | None = None
    for word in words:
        if array is not None:
            name, parts = array
            parts.append(word.removesuffix(")"))
            if word.endswith(")") and word.count("(") < word.count(")"):
                variables[name] = " ".join(shlex.quote(part) for part in parts if part)
                array = None
            continue
        begun = re.fullmatch(r"([A-Za-z_]\w*)\+?=\((.*)", word, re.DOTALL)
        if begun and "$" not in word[: word.index("(") + 1]:
            array = (begun[1], [])
            rest = begun[2]
            if rest.endswith(")"):
                variables[begun[1]], array = rest[:-1], None
            elif rest:
                array[1].append(rest)
            continue
        several = re.fullmatch(r"\$\{?(\w+)(?:\[@\])?\}?", word)
        if several and several[1] in variables:
            yield from _words(_split(variables[several[1]]), variables)
        else:
            yield word


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an apostrophe in a value that was quoted
        return text.split()


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    for _ in range(_ROUNDS):
        before = text
        text = _PLAIN.sub(lambda m: variables.get(m[1] or m[2] or m[3], m.group()), text)
        text = _ARITHMETIC.sub(lambda m: _computed(m, variables), text)
        text = _DEFAULT.sub(lambda m: variables.get(m[1], m[2]), text)
        if text == before:
            break
    return text


def _computed(found: re.Match[str], variables: Mapping[str, str]) -> str:
    """The value of integer arithmetic. Other text stays as it is."""
    text = re.sub(r"[A-Za-z_]\w*", lambda m: variables.get(m.group(), m.group()), found[1])
    try:
        return str(_number(ast.parse(text.replace("$", ""), mode="eval").body))
    except (SyntaxError, TypeError, ValueError, ZeroDivisionError):
        return found.group()


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError("not arithmetic of whole numbers")


_CONFIGS = ("GRPOConfig", "RLOOConfig")
_TRAINERS = ("GRPOTrainer", "RLOOTrainer")
_ARGUMENTS = {"model": "model_name_or_path"}
_ADAPTERS = {"r": "lora_r", "target_modules": "lora_target_modules"}
_FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Formats that ``load_dataset`` takes instead of a name, with ``data_files``."""
_CHANGES = ("map", "filter", "select", "rename_column", "train_test_split")


def keywords(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The keys of ``trl grpo`` that a script sets, and warnings.

    They come from ``GRPOConfig(...)``, ``GRPOTrainer(...)``, ``LoraConfig(...)`` and
    ``load_dataset(...)``. Values that are not literals are ``Unknown``. Raises ``ValueError``
    without a ``GRPOConfig(...)``.
    """
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{file}: not Python: {error}") from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    config = next((call for call in calls if _name(call) in _CONFIGS), None)
    if any(_name(call) == "PPOTrainer" for call in calls):
        raise ValueError(
            f"{file}: PPOTrainer trains a critic, which no algorithm here has: use GRPOTrainer, "
            "which compares the responses of a prompt"
        )
    if config is None or not (config.keywords or config.args):
        raise ValueError(
            f"{file}: no GRPOConfig(...) with arguments: if they come from a file or the "
            "command line, translate that file"
        )
    given = {word.arg or "**": _literal(word.value) for word in config.keywords}
    if _name(config) == "RLOOConfig":
        given = {"num_generations": 2, "beta": 0.05, "trainer": "RLOOTrainer"} | given
    warnings: list[str] = []
    trainer = next((call for call in calls if _name(call) in _TRAINERS), None)
    if trainer is not None:
        given |= _trained(trainer, tree, file, warnings)
    adapters = next((call for call in calls if _name(call) == "LoraConfig"), None)
    if adapters is not None:
        given["use_peft"] = True
        for word in adapters.keywords:
            name = word.arg or "**"
            known = _ADAPTERS.get(name, name if name.startswith("lora_") else f"lora_{name}")
            given[known] = _literal(word.value)
    given |= _rows(calls, warnings)
    return given, warnings


def _name(call: ast.Call) -> str:
    called = call.func
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _literal(node: ast.expr) -> Any:
    """A literal's value, or the name behind ``torch.`` (``Unknown`` for anything else)."""
    if isinstance(node, ast.Dict) and all(node.keys):
        keys = [_literal(key) for key in node.keys if key is not None]
        return dict(zip(map(str, keys), map(_literal, node.values), strict=True))
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
        return node.attr
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return Unknown(ast.unparse(node))
    return plain(list(value) if isinstance(value, tuple) else value)


def _trained(
    trainer: ast.Call, tree: ast.Module, file: Path, warnings: list[str]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in trainer.keywords:
        if word.arg in _ARGUMENTS:
            found[_ARGUMENTS[word.arg]] = _literal(word.value)
        elif word.arg == "reward_funcs":
            nodes = word.value.elts if isinstance(word.value, ast.List) else [word.value]
            names = [_function(node, tree, file, warnings) for node in nodes]
            unknown = any(isinstance(name, Unknown) for name in names)
            found["reward_funcs"] = Unknown(ast.unparse(word.value)) if unknown else names
        elif word.arg in ("tools", "environment_factory", "rollout_func"):
            found[word.arg] = Unknown(ast.unparse(word.value))
    return found


def _function(node: ast.expr, tree: ast.Module, file: Path, warnings: list[str]) -> str:
    """The place of a reward function: this script, an imported module, or a model."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.Name):
        return Unknown(ast.unparse(node))
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom) and any(
            (alias.asname or alias.name) == node.id for alias in each.names
        ):
            name = next(a.name for a in each.names if (a.asname or a.name) == node.id)
            return f"{each.module}.{name}"
    if not any(isinstance(each, ast.FunctionDef) and each.name == node.id for each in tree.body):
        return Unknown(node.id)
    if _guarded(tree):
        warnings.append(
            f"rewards: grading processes load {file} for '{node.id}', with all its imports: a file "
            "with the function alone starts faster and needs less memory"
        )
        return f"{file}:{node.id}"
    warnings.append(
        f"rewards: loading {file} would start its training: move '{node.id}' into rewards.py"
    )
    return f"rewards.py:{node.id}"


def _guarded(tree: ast.Module) -> bool:
    """Whether importing the script starts no training."""
    top = [each for each in tree.body if not isinstance(each, ast.FunctionDef | ast.ClassDef)]
    free = [
        each for each in top if not (isinstance(each, ast.If) and "__name__" in ast.unparse(each))
    ]
    calls = [node for each in free for node in ast.walk(each) if isinstance(node, ast.Call)]
    return not any(_name(call) in _TRAINERS for call in calls)


def _files(given: Any) -> Any:
    files = cast(dict[str, Any], given).get("train") if isinstance(given, dict) else given
    return files or Unknown("data_files")


def _rows(calls: list[ast.Call], warnings: list[str]) -> dict[str, Any]:
    loads = [call for call in calls if _name(call) == "load_dataset"]
    if not loads:
        return {}
    named = {word.arg: _literal(word.value) for word in loads[0].keywords}
    places = [_literal(arg) for arg in loads[0].args]
    found: dict[str, Any] = {}
    for key, place, word in (
        ("dataset_name", 0, "path"),
        ("dataset_config", 1, "name"),
        ("dataset_train_split", None, "split"),
    ):
        if word in named:
            found[key] = named[word]
        elif place is not None and place < len(places):
            found[key] = places[place]
    if found.get("dataset_name") in _FORMATS:
        found["dataset_name"] = _files(named.get("data_files"))
    split = found.get("dataset_train_split")
    if isinstance(split, list):
        found["dataset_train_split"] = split[0]
    if len(loads) > 1:
        warnings.append("data.path: only the first of several load_dataset(...) is used")
    changes = sorted({_name(call) for call in calls} & set(_CHANGES))
    if changes:
        warnings.append(
            f"data: the script changes its rows ({', '.join(changes)}), which is not translated: "
            "see data.input_key, data.label_key, data.system_prompt"
        )
    return found
