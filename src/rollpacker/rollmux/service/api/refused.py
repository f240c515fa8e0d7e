"""A request that is not carried out, and what its sender is told."""

from __future__ import annotations

from typing import Any


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """A request is refused and changed nothing.

    Args:
        status: of HTTP.
        error: one line: what is wrong, and which field.
        more: further fields of the answer.
    """

    def __init__(self, status: int, error: str, **more: Any) -> None:
        super().__init__(error)
        self.status = status
        self.body: dict[str, Any] = {"error": error} | more
