"""Inequalities in one variable as the intervals that they describe."""

from __future__ import annotations

import re

_BOUNDED = re.compile(r"([a-zA-Z])\s*(<|>|\\le|\\ge|\\leq|\\geq|<=|>=)\s*([^<>=a-zA-Z]+)")
_EXCEPT = re.compile(r"([a-z])\s*\\ne\s*([^<>=a-zA-Z,\\]+)")
_DOWNWARDS = re.compile(r"([^<>=\\]+?)\s*(>|\\ge)\s*([a-zA-Z])\s*(>|\\ge)\s*([^<>=\\]+)")
_EITHER = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])|\\(?:lor|vee)(?![A-Za-z])|或")


def of_one(text: str) -> str | None:
    """``x \\ne 2`` as intervals, ``3 > x > 1`` the usual way round; None of other texts."""
    if match := _EXCEPT.fullmatch(text):
        return rf"(-\infty, {match[2]}) \cup ({match[2]}, \infty)"
    if match := _DOWNWARDS.fullmatch(text):
        upper, first, variable, second, lower = match.groups()
        return f"{lower} {_turned(second)} {variable} {_turned(first)} {upper}"
    return None


def of_list(parts: list[str], text: str) -> str | None:
    """``x < 1 or x > 3`` and ``x > 1, x < 3`` as intervals; None of other lists.

    Args:
        parts: the list's items.
        text: all of it, which says how they are joined.
    """
    matches = [match for part in parts if (match := _BOUNDED.fullmatch(part))]
    if len(matches) < len(parts) or len({match[1] for match in matches}) != 1:
        return None
    above = [match for match in matches if match[2] in (">", ">=", r"\ge")]
    below = [match for match in matches if match not in above]
    lefts = [("(" if match[2] == ">" else "[") + match[3].strip() for match in above]
    rights = [match[3].strip() + (")" if match[2] == "<" else "]") for match in below]
    if _EITHER.search(text):
        intervals = [rf"(-\infty, {right}" for right in rights]
        intervals += [rf"{left}, \infty)" for left in lefts]
        return r" \cup ".join(intervals)
    return f"{lefts[0]}, {rights[0]}" if len(lefts) == len(rights) == 1 else None


def _turned(sign: str) -> str:
    return "<" if sign == ">" else r"\le"
