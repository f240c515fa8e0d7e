"""Which series a query in PromQL asks for, as far as our own queries go."""

import re
from dataclasses import dataclass

_TEXT = re.compile(r"\"[^\"]*\"")
_SELECTOR = re.compile(r"\b(up|rollmux_\w+)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"\"")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Asked:
    """Series by name with the labels that are matched; labels by which is grouped."""

    series: tuple[tuple[str, frozenset[str]], ...]
    grouped: frozenset[str]


def asked(query: str) -> Asked:
    """What a query asks for. Texts are left out: they may hold braces."""
    bare = _TEXT.sub('""', query)
    series = tuple(
        (name, frozenset(_MATCHER.findall(matchers))) for name, matchers in _SELECTOR.findall(bare)
    )
    groups = [part.strip() for found in _GROUPING.findall(bare) for part in found.split(",")]
    return Asked(series, frozenset(part for part in groups if part))


def values(query: str) -> list[tuple[str, str, str]]:
    """Series, label and text of every exact match."""
    found: list[tuple[str, str, str]] = []
    for name, matchers in re.findall(r"\b(rollmux_\w+)\{((?:[^}\"]|\"[^\"]*\")*)\}", query):
        pairs = re.findall(r"(\w+)\s*=~?\s*\"([^\"]*)\"", matchers)
        found += [(name, label, each) for label, text in pairs for each in text.split("|")]
    return found
