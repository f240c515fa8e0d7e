"""One result beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["predicted", "fitted", "not_reproduced"]

TOLERANCE = 0.10
"""Relative error from which a result counts as not reproduced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """A cell of a table or a bar of a figure.

    Args:
        name: figure, setting and quantity, by slashes.
        paper: the paper's value; None where it has none.
        ours: the simulator's; None where it has none.
        relative_error: of ours to the paper's; None where one has none.
        status: ``fitted`` where a cost or a length was fitted to this very value, ``predicted``
            where none was, ``not_reproduced`` where ours is beyond the tolerance.
        note: what it rests on, or why it is missed.
    """

    name: str
    paper: float | None
    ours: float | None
    relative_error: float | None
    status: Status
    note: str = ""


def row(
    name: str, paper: float | None, ours: float, *, fitted: bool = False, note: str = ""
) -> ResultRow:
    """A row whose status follows from its error."""
    error = None if paper is None else ours / paper - 1.0
    status: Status = "fitted" if fitted else "predicted"
    if error is not None and abs(error) > TOLERANCE:
        status = "not_reproduced"
    return ResultRow(
        name=name, paper=paper, ours=ours, relative_error=error, status=status, note=note
    )


def missing(name: str, paper: float, why: str) -> ResultRow:
    """A row that the simulator has no answer to."""
    return ResultRow(
        name=name, paper=paper, ours=None, relative_error=None, status="not_reproduced", note=why
    )


def within(rows: Iterable[ResultRow]) -> int:
    """How many reproduce the paper."""
    return sum(r.paper is not None and r.status != "not_reproduced" for r in rows)
