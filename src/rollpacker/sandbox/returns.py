"""What calls must return and are given, from how datasets write it."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

_LIST = re.compile(r"(?:typing\.)?(List|list|Sequence|Iterable|Optional)\[(.*)\]", re.DOTALL)
_PLAIN = {"int": 0, "float": 0, "str": 0, "bool": 0, "list": 1, "List": 1}
_PLAIN |= {"ListNode": 1, "TreeNode": 1}
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_MOST_DIGITS = 20_000


def wanted(
    column: str, name: str, inputs: Sequence[Any], outputs: Sequence[Any], row: Mapping[str, Any]
) -> tuple[Sequence[Any], bool]:
    """What calls must return, and whether a list with nothing but it is right as well.

    Outputs are JSON text where the inputs are, as LiveCodeBench and PRIME have it; beside
    arguments that are values, a text is a text. APPS and TACO put some results into a list of
    their own; the row's starter code may say that they are no deeper. Without such code, results
    that are all lists of one may be either: both are right, as in the harnesses of APPS and PRIME.
    """
    as_text = all(isinstance(each, str) for each in (*inputs, *outputs))
    values = decoded(column, outputs) if as_text else outputs
    if not all(isinstance(each, list) and len(each) == 1 for each in values):
        return values, False
    bare = [each[0] for each in values]
    depth = _depth_of_type(_signature(name, row)[1])
    if depth is not None:
        return (bare if _depth(values) > depth else values), False
    return (bare, True) if len(values) > 2 * as_text else (values, False)


def _depth(values: Sequence[Any]) -> int:
    """Of the lists in each of the values."""
    depth = 0
    while lists := [each for each in values if isinstance(each, list)]:
        values = [item for each in lists for item in each]
        depth += 1
    return depth


def _depth_of_type(text: str) -> int | None:
    """Of the lists that an annotation names; None where what is in them is not known."""
    depth = 0
    while found := _LIST.fullmatch(text.strip()):
        depth += found[1] != "Optional"
        text = found[2]
    inner = _PLAIN.get(text.strip())
    return None if inner is None else depth + inner


def _signature(name: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """The arguments of a function, and what it returns, by the annotations in the row's starter
    code."""
    starter = row.get("starter_code")
    if not isinstance(starter, str):
        return "", ""
    head = rf"^[ \t]*def {re.escape(name)}\s*\(([^)]*)\)\s*(?:->\s*([^:\n]+))?:"
    found = re.search(head, starter, re.MULTILINE)
    return (found[1], found[2] or "") if found else ("", "")


def nodes_of(column: str, name: str, row: Mapping[str, Any]) -> dict[str, str]:
    """LeetCode's classes of linked lists and trees among the arguments, by place and by name, and
    of the ``return``; behind ``*`` where it is a list of them."""
    arguments, returned = _signature(name, row)
    if "Node" not in arguments + returned:
        return {}
    given = [each for each in re.split(r",\s*(?=\w+\s*[:=])", arguments) if ":" in each]
    texts = {str(place): each for place, each in enumerate(given)} | {"return": returned}
    texts |= {each.partition(":")[0].strip(" \nself,"): each for each in given}
    if any(re.search(r"\bNode\b", text) for text in texts.values()):
        raise ValueError(f"{column}: a graph of class 'Node' is not built: leave this row out")
    kinds = {
        key: re.search(r"([Ll]ist\[.*)?\b((?:List|Tree)Node)\b", text)
        for key, text in texts.items()
    }
    return {key: "*" * bool(kind[1]) + kind[2] for key, kind in kinds.items() if kind}


def returns_nothing(name: str, row: Mapping[str, Any]) -> bool:
    """Whether the row's starter code says that the function changes its argument in place."""
    return _signature(name, row)[1].strip() == "None"


def with_number_keys(args: list[Any]) -> list[Any]:
    """A single argument with the keys that it had before JSON made text of them, as in APPS."""
    if len(args) != 1 or not isinstance(args[0], dict):
        return args
    if not all(isinstance(key, str) and _NUMBER.fullmatch(key) for key in args[0]):
        return args
    return [{int(key): value for key, value in args[0].items()}]


def decoded(column: str, texts: Sequence[str]) -> Sequence[Any]:
    """Values that are written as JSON or as Python has them; words of which some are neither are
    meant as they are."""
    values: list[Any] = []
    for text in texts:
        try:
            values.append(value_of(column, text))
        except ValueError:
            if not text[:1].isalpha():
                raise
            return texts
    return values


def value_of(column: str, text: str) -> Any:
    """What is written as JSON or as Python has it."""
    try:
        return read_json(column, text)
    except ValueError as error:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise error from None


def read_json(column: str, value: Any, integer: Callable[[str], int] = int) -> Any:
    """A value that may be JSON text. Raises ``ValueError``, one line with the column."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_int=integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"{column}: not JSON ({error.msg}): {value!r:.60}") from error
    except (ValueError, RecursionError) as error:
        if integer is int and isinstance(error, ValueError):
            return read_json(column, value, _long)
        raise ValueError(f"{column}: {error}: leave this row out") from error


def _long(digits: str) -> int:
    """An integer that may have more digits than Python reads."""
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits")
    return int(Decimal(digits))
