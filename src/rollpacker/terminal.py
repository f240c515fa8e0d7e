"""The terminal as everything of ours writes to it: what others wrote is shown, never obeyed.

Errors of rewards, answers of environments, names of jobs and the like may hold sequences that move
the cursor, rename the window or hide what stands there. They all come out here. How wide it is, is
known here too: ``docker exec`` and some schedulers set ``COLUMNS=0``, which is no width.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable

from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment

from rollpacker.errors import visible

_ALLOWED = re.compile(r"(\x1b\[[0-9;]{0,40}m|\r)")


def coloured(text: str) -> str:
    """``visible``, but colours and progress bars stay: of what a program printed."""
    parts = _ALLOWED.split(text)
    return "".join(part if at % 2 else visible(part) for at, part in enumerate(parts))


def drop_no_size() -> None:
    """Forget a width or height of 0 in the environment, for the consoles of libraries."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "1").strip("0"):
            del os.environ[name]


class Terminal(Console):
    """Rich's console, for texts of anybody."""

    @property
    def size(self) -> ConsoleDimensions:
        """Columns and lines; what is said to have none is as large as it is found to be."""
        columns, lines = super().size
        found = shutil.get_terminal_size()
        return ConsoleDimensions(columns or found.columns, lines or found.lines)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self.width, self.height = new_size

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments, harmless; those that control the terminal are Rich's own."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
