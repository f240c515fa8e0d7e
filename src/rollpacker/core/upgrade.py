"""What earlier versions wrote into journals, as it is written today."""

from __future__ import annotations

from typing import Any

VERSION = 2
"""Of the lines that are written, named in every ``meta`` line; version 1 named none."""


def upgrade(version: int, line: dict[str, Any]) -> dict[str, Any]:
    """A line of a journal of ``version`` as this one would write it.

    Raises ``ValueError`` when it was written by a later rollpacker.
    """
    if version > VERSION:
        raise ValueError(f"written by a later rollpacker, in version {version} of the journal")
    return line
