"""Overrides (``key.sub=value``) in a launch script, read without running it."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping

from rollpacker.cli.convert.values import value_of

_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_COMMAND = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")
_PLAIN = re.compile(r"\$\{(\w+)\}|\$(\w+)|\$\{(\w+)\[@\]\}")
_DEFAULT = re.compile(r"\$\{(\w+):?-([^${}]*)\}")
_ASSIGNED = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w@]*(?:\.[\w@-]+)+)=(.*)", re.DOTALL)
_FOUND_OUT = {"HOME": "~", "PWD": "."}
"""Variables that every shell has, as paths say them."""
_ROUNDS = 8
"""Variables within variables."""
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
}


def overrides(text: str) -> dict[str, object]:
    """Each override with its value, the last one where there are several.

    Variables that the script sets are put in; branches are not followed. What a variable of the
    environment or a command would say is ``Unknown``. Raises ``ValueError`` on open quotes.
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
            # A name of the environment (X=$X) has no value here, and would never end.
            if not re.search(rf"\$\{{?{assigned[1]}\b", value):
                variables[assigned[1]] = value
    return found


def _closed(found: re.Match[str]) -> str:
    """Arithmetic as one word."""
    return re.sub(r"\s+", "", found.group())


def _words(words: list[str], variables: dict[str, str]) -> Iterator[str]:
    """Words with variables and arrays of several words taken apart."""
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
    """A sum of whole numbers and variables; as it stands where it is anything else."""
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
    raise ValueError("no arithmetic of whole numbers")
