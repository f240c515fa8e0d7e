"""Compares the values of two expressions exactly, to 100 digits behind those of the larger one.
math-verify treats numbers that differ by less than 1e-15 as equal, alone and in tuples and sets."""

from __future__ import annotations

from typing import Any

import sympy as sp

_DIGITS, _MOST_DIGITS = 100, 2000  # digits behind a number's own, and in all
_PLACES = (7, 11, 13, 17, 19, 23)
"""The values of variables for comparing expressions: whole, because some variables count things."""
_ROUNDED = 2e-6  # Relative difference between a decimal fraction and the number that it rounds
_SET = (sp.FiniteSet, sp.Union)


def equal(one: Any, other: Any) -> bool | None:
    """Return whether two sympy objects have one value, or None if values alone cannot decide. For
    anything except numbers without a decimal point, the only answers are False and None."""
    if isinstance(one, sp.Expr) and isinstance(other, sp.Expr):
        try:
            return _values(one, other)
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
            return None  # sympy cannot work it out
    if isinstance(one, _SET) and isinstance(other, _SET):
        apart = any(all(equal(each, item) is False for item in other.args) for each in one.args)
    elif isinstance(one, (sp.Interval, sp.Tuple, sp.MatrixBase)) and isinstance(other, type(one)):
        sides: Any = one, other
        parts = [each.flat() if hasattr(each, "flat") else each.args for each in sides]
        apart = any(equal(*pair) is False for pair in zip(*parts, strict=False))
    else:
        apart = False
    return False if apart else None


def _values(one: sp.Expr, other: sp.Expr) -> bool | None:
    difference: Any = (one - other).replace(
        lambda part: isinstance(part, sp.UnevaluatedExpr), lambda part: part.args[0]
    )
    variables = sorted(difference.free_symbols, key=str)
    growing = difference.atoms(sp.factorial, sp.exp)
    if len(variables) > len(_PLACES) or any(
        each.args[0].has(sp.factorial, sp.exp) for each in growing
    ):
        return None
    places: Any = dict(zip(variables, _PLACES, strict=False))
    rounded = one.has(sp.Float) or other.has(sp.Float)
    least = _ROUNDED * _size(one, other, places) if rounded else 0.0
    if variables or rounded:
        return None if _is_zero(difference, places, _DIGITS, least) else False
    if not _is_zero(difference, places, _DIGITS):
        return False
    # A small difference of large numbers lies behind all of their digits; for roots, twice as far.
    digits = _DIGITS + 3 * int(sp.log(_size(one, other) + 1, 10))
    if digits > _MOST_DIGITS:
        return difference.doit() == 0
    return digits == _DIGITS or _is_zero(difference, places, digits)


def _size(one: sp.Expr, other: sp.Expr, places: Any = None) -> sp.Expr:
    return max(abs(side.evalf(8, subs=places)) for side in (one, other))


def _is_zero(difference: Any, places: Any, digits: int, least: Any = 0.0) -> bool:
    # ``digits`` bounds the precision. Raises ``ValueError`` if the difference is not a number.
    parts = difference.evalf(2, subs=places, maxn=digits).as_real_imag()
    if not all(part.is_Number and part.is_finite for part in parts):
        raise ValueError("no number")
    # A part without one certain digit is zero.
    return not any(part and getattr(part, "_prec", 0) != 1 and abs(part) > least for part in parts)
