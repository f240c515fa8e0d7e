"""Whether two expressions have one value, to a hundred digits and however small they are.

math-verify takes numbers that differ by less than 1e-15 for equal, alone and in tuples and sets.
"""

from __future__ import annotations

from typing import Any

import sympy as sp

_DIGITS = 100
_PLACES = (7, 11, 13, 17, 19, 23)
"""Where expressions in variables are compared: whole numbers, as some variables count things."""
_ROUNDED = 2e-6
"""Relative difference of a decimal fraction to what it rounds."""
_SET = (sp.FiniteSet, sp.Union)


def equal(one: Any, other: Any) -> bool | None:
    """Whether two objects of sympy have one value; None where their values alone don't say so.

    Of anything but numbers without decimal point it only knows when they differ.
    """
    if isinstance(one, sp.Expr) and isinstance(other, sp.Expr):
        try:
            return _values(one, other)
        except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError):
            return None  # sympy cannot work it out
    if isinstance(one, _SET) and isinstance(other, _SET):
        apart = any(all(equal(each, item) is False for item in other.args) for each in one.args)
    elif isinstance(one, (sp.Interval, sp.Tuple, sp.MatrixBase)) and isinstance(other, type(one)):
        parts = (
            (one.flat(), other.flat()) if isinstance(one, sp.MatrixBase) else (one.args, other.args)
        )
        apart = any(equal(*pair) is False for pair in zip(*parts, strict=False))
    else:
        apart = False
    return False if apart else None


def _values(one: sp.Expr, other: sp.Expr) -> bool | None:
    difference = (one - other).replace(
        lambda part: isinstance(part, sp.UnevaluatedExpr), lambda part: part.args[0]
    )
    variables = sorted(difference.free_symbols, key=str)
    growing = difference.atoms(sp.factorial, sp.exp)
    if len(variables) > len(_PLACES) or any(
        each.args[0].has(sp.factorial, sp.exp) for each in growing
    ):
        return None
    places = dict(zip(variables, _PLACES, strict=False))
    rounded, least = one.has(sp.Float) or other.has(sp.Float), 0.0
    if rounded:
        least = _ROUNDED * max(abs(side.evalf(8, subs=places)) for side in (one, other))
    parts = difference.evalf(2, subs=places, maxn=_DIGITS).as_real_imag()
    if not all(part.is_Number and part.is_finite for part in parts):
        return None
    # A part of which not one digit is certain is zero, as far as it was worked out.
    apart = any(part and getattr(part, "_prec", 0) != 1 and abs(part) > least for part in parts)
    return None if (variables or rounded) and not apart else not apart
