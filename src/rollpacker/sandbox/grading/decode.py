"""Reads a program's result: typed JSON, its size, depth and types checked. The time is linear in
the bytes, whatever they are: only text is hashed."""

from __future__ import annotations

import ast
import builtins
import json
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollpacker.sandbox.guest.values import encode

_DEPTH = 300
_LARGEST = 2 << 20
_INTEGER_DIGITS = 20_000
FEW_MARKS = 16  # more brackets and commas than in a report without a value: {"error":"..."}
# more than a list of 200,000 numbers has
_MOST_MARKS = 700_000
_PLAIN = (type(None), bool, str)


Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]


class BadResultError(Exception):
    """The program returned no value of the format."""


class Pairs(list[tuple[Any, Any]]):
    """A dict, not hashed, because a program may choose keys that collide."""

    def items(self) -> Pairs:
        return self


class SetMembers(list[Any]):
    """A set, not hashed."""


def most_marks(expected: Any) -> int:
    """Return the most brackets and commas in a report of a value like the expected one."""
    return min(FEW_MARKS + _marks(expected), _MOST_MARKS)


def _marks(value: Any) -> int:
    if isinstance(value, dict):
        return 5 + 5 * len(value) + _marks_in(value) + _marks_in(value.values())
    return 5 + _marks_in(value) if isinstance(value, _SEVERAL) else 3


def _marks_in(values: Collection[Any]) -> int:
    if any(issubclass(kind, _SEVERAL) for kind in set(map(type, values))):
        return sum(map(_marks, values))
    return 3 * len(values)


_SEVERAL = (list, tuple, set, dict)


def read_report(data: bytes, most: int = _MOST_MARKS) -> dict[str, Any]:
    """Return the harness's report. Raises ``BadResultError``, also if it has more than ``most``
    brackets and commas."""
    if not data:
        raise BadResultError("it returned nothing")
    if len(data) > _LARGEST:
        raise BadResultError("its result is too large")
    _check_shape(data, most)
    try:
        # UTF-8 only: the shape was checked in UTF-8.
        report = json.loads(data.decode(), parse_int=_no_number, parse_float=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadResultError("its result is not JSON") from error
    if not isinstance(report, dict):
        raise BadResultError("its result is not a report")
    return report


def _no_number(text: str) -> Any:
    raise ValueError(f"a plain number: {text[:20]}")


def _check_shape(data: bytes, most: int) -> None:
    outside = _without_strings(data)
    objects = np.count_nonzero(outside == ord("{"))
    opens = (outside == ord("[")) | (outside == ord("{"))
    opened = np.count_nonzero(opens)
    # A recursive parser could overflow the trainer's stack.
    if opened > _DEPTH and _depth(outside, opens) > _DEPTH:
        raise BadResultError("its result is nested too deeply")
    if objects > 1:
        raise BadResultError("its result is not a report")
    if opened + np.count_nonzero(outside == ord(",")) > most:
        raise BadResultError("its result is larger than what is expected")


def _without_strings(data: bytes) -> Bytes:
    bare = data
    if b"\\" in data:
        bare = data.replace(rb"\\", b"").replace(rb"\"", b"")
    found = np.frombuffer(bare, dtype=np.uint8)
    # Only the last bit of the count matters: inside or outside of a string.
    quotes = np.cumsum(found == ord('"'), dtype=np.uint8)
    return found[(quotes & 1) == 0]


def _depth(outside: Bytes, opens: Bits) -> int:
    closes = (outside == ord("]")) | (outside == ord("}"))
    return int(np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32).max(initial=0))


def decode(value: Any) -> Any:
    """Decode a value of ``guest.values.encode``, with ``Pairs`` and ``SetMembers`` for dicts and
    sets. Raises ``BadResultError``."""
    if type(value) in _PLAIN:
        return value
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)):
        raise BadResultError("its result has a value of no known type")
    kind, content = value
    if kind in _SCALARS:
        return _scalar(_SCALARS[kind], content)
    if not isinstance(content, list):
        raise BadResultError("its result has a collection without items")
    if kind == "d":
        return Pairs([_pair(item) for item in content])
    if kind not in _COLLECTIONS:
        raise BadResultError("its result has a collection of no known type")
    items = _COLLECTIONS[kind]([decode(item) for item in content])
    if kind == "s" and not all(map(_is_hashable, items)):
        raise BadResultError("its result has a set of unhashable items")
    return items


_COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": SetMembers}


def _pair(item: Any) -> tuple[Any, Any]:
    if not (isinstance(item, list) and len(item) == 2):
        raise BadResultError("its result has a malformed dict")
    key, value = decode(item[0]), decode(item[1])
    if not _is_hashable(key):
        raise BadResultError("its result has a dict with unhashable keys")
    return key, value


def _is_hashable(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_hashable, value))
    return not isinstance(value, list)


def _scalar(read: Callable[[str], int | float | bytes], text: Any) -> int | float | bytes:
    try:
        return read(text)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadResultError("its result has a malformed scalar") from error


def _integer(text: str) -> int:
    if len(text) > _INTEGER_DIGITS:
        raise BadResultError("its result has an integer that is too large")
    value = int(text, 16)
    if f"{value:x}" != text:
        raise ValueError(text[:20])
    return value


_SCALARS: dict[str, Callable[[str], int | float | bytes]] = {
    "i": _integer,
    "f": float.fromhex,
    "b": bytes.fromhex,
}


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 6, 120, 120
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = 30

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        bits = x.bit_length()
        return repr(x) if bits < _SHOWN_BITS else f"<an integer of {bits} bits>"

    def repr_Pairs(self, x: Pairs, level: int) -> str:  # noqa: N802
        return self._first(f"{self._one(k, level)}: {self._one(v, level)}" for k, v in x)

    def repr_SetMembers(self, x: SetMembers, level: int) -> str:  # noqa: N802
        return self._first(self._one(each, level) for each in x)

    def _one(self, value: Any, level: int) -> str:
        return self.repr1(value, level - 1) if level > 0 else "..."

    def _first(self, shown: Iterable[str]) -> str:
        first = list(islice(shown, self.maxdict + 1))
        rest = ["..."] * (len(first) > self.maxdict)
        return f"{{{', '.join([*first[: self.maxdict], *rest])}}}"


_SHOWN_BITS = 400
_brief = _Brief()


def shorten(value: Any) -> str:
    """Return a value, decoded or from a row, as a short line."""
    return _brief.repr(value)


# Expected values are taken out of asserts, so that a program cannot forge its result. Only the
# row's own text is parsed here, never the text of a model.

_MADE: dict[str, Any] = {"float": float, "list": list, "set": set, "tuple": tuple}
_FOREIGN = {*dir(builtins), *sys.stdlib_module_names, "pytest", ""}
_ISCLOSE = {"rel_tol": 1e-9, "abs_tol": 0.0}
_ENDS = ast.Return | ast.Yield | ast.YieldFrom | ast.Await
_LEFT = ast.Assert | ast.Raise | ast.With | ast.ClassDef
_LEFT_OUT = re.compile(r"skip|xfail|pytestmark")


class Demand(NamedTuple):
    """The demand of an assert, ``source``, on a value. The value must equal ``expected``, be of its
    type too (``same_type``), or be within ``within``."""

    source: str
    expected: Any
    same_type: bool = False
    within: float | None = None

    def holds(self, found: Any) -> bool:
        if self.within is not None:
            near = type(found) in (int, float) and abs(found) < sys.float_info.max
            return near and abs(found - self.expected) <= self.within
        same = type(found) is type(self.expected) or not self.same_type
        return same and bool(_plain(found) == self.expected)


class Revealed(NamedTuple):
    """The ``code`` of tests that reveal values as ``__reveal__(place, value)``, and the ``checks``
    of these by place. ``forgeable``: the program's process judges some tests."""

    code: str
    checks: list[Demand]
    forgeable: bool


@lru_cache(1024)
def reveal(source: str) -> Revealed:
    """Return tests without the literals that they expect, for asserts that always run."""
    checks: list[Demand] = []
    try:
        tree = ast.parse(source)
        foreign = _foreign(tree)
        for body in () if _LEFT_OUT.search(source) else _bodies(tree):
            for place, each in enumerate(body):
                demand = isinstance(each, ast.Assert) and _demand(each.test, foreign)
                if demand:
                    (body[place],) = ast.parse(f"__reveal__({len(checks)}, {demand[0]})").body
                    checks.append(demand[1])
        code = ast.unparse(_Guard().visit(tree))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return Revealed(source, [], forgeable=True)
    left = any(isinstance(each, _LEFT) for each in ast.walk(tree))
    return Revealed(code, checks, left or not checks)


class _Guard(ast.NodeTransformer):
    # Wraps compared values in ``__real__(value)``, which inspects them before the comparison.

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        node.left, *node.comparators = map(_guarded, [node.left, *node.comparators])
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr.startswith("assert"):
            node.args = [*map(_guarded, node.args)]
        return node


def _guarded(value: ast.expr) -> ast.expr:
    plain = isinstance(value, ast.Constant | ast.Starred)
    return value if plain else ast.Call(ast.Name("__real__"), [value], [])


def _bodies(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    yield tree.body
    called = {_root(each.value) for each in tree.body if isinstance(each, ast.Expr)}
    functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    for name, each in functions.items():
        whole = not each.decorator_list and not any(isinstance(n, _ENDS) for n in ast.walk(each))
        if whole and (name.startswith("test") or name in called):
            yield each.body


def _foreign(tree: ast.Module) -> set[str]:
    defined = [each for each in tree.body if isinstance(each, ast.FunctionDef | ast.ClassDef)]
    imports = [each for each in tree.body if isinstance(each, ast.ImportFrom)]
    imported = [name for each in imports if each.module != "solution" for name in each.names]
    return _FOREIGN | {each.name for each in defined} | {n.asname or n.name for n in imported}


def _demand(test: ast.expr, foreign: Collection[str]) -> tuple[str, Demand] | None:
    source = ast.unparse(test)
    within, same_type = None, False
    try:
        match test:
            case ast.Compare(
                ast.Call(ast.Name("abs"), [ast.BinOp(one, ast.Sub(), other)]),
                [ast.Lt() | ast.LtE()],
                [limit],
            ):
                found, expected = _sides(one, other)
                within = float(_literal(limit)) + 0.0 * expected  # fails unless both are numbers
            case ast.Call(ast.Attribute(ast.Name("math"), "isclose"), [one, other], given):
                found, expected = _sides(one, other)
                # A program may have replaced math.isclose, so it is computed here.
                limits = _ISCLOSE | {str(each.arg): _literal(each.value) for each in given}
                within = max(limits["rel_tol"] * abs(expected), limits["abs_tol"])
            case ast.Compare(one, [ast.Eq() | ast.Is() as how], [other]):
                found, expected = _sides(one, other)
                same_type = isinstance(how, ast.Is)
            case ast.UnaryOp(ast.Not(), found) | (ast.Call() as found):
                expected, same_type = test is found, True
            case _:
                return None
    except (TypeError, ValueError):
        return None
    single = isinstance(expected, bool | None)
    # A True from a function that compares inside the sandbox proves nothing.
    if (single and _root(found) in foreign) or (same_type and not single):
        return None
    truth = "" if within is not None or isinstance(test, ast.Compare) else "not not "
    return truth + ast.unparse(found), Demand(source, expected, same_type, within)


def _sides(one: ast.expr, other: ast.expr) -> tuple[ast.expr, Any]:
    try:
        return one, _literal(other)
    except (TypeError, ValueError):
        return other, _literal(one)


def _literal(node: ast.expr) -> Any:
    # Raises ``TypeError`` or ``ValueError`` if the value is not of plain types.
    match node:
        case ast.Call(ast.Name(name), [inner], []) if name in _MADE:
            value = _MADE[name](_literal(inner))
        case _:
            value = ast.literal_eval(node)
    encode(value)
    return value


def _root(node: ast.AST) -> str:
    # The name that calls, attributes and items begin with, or "".
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _plain(value: Any) -> Any:
    # Hashed here, since these dicts and sets are no larger than the expected value.
    if isinstance(value, Pairs):
        return {key: _plain(each) for key, each in value}
    if isinstance(value, SetMembers):
        return set(value)
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
