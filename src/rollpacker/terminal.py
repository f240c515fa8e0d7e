"""The terminal as everything of ours writes to it: what others wrote is shown, never obeyed.

Errors of rewards, answers of environments, names of jobs and the like may hold sequences that move
the cursor, rename the window or hide what stands there. They all come out here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rollpacker.errors import visible

_ALLOWED = re.compile(r"(\x1b\[[0-9;]{0,40}m|\r)")


def coloured(text: str) -> str:
    """``visible``, but colours and progress bars stay: of what a program printed."""
    parts = _ALLOWED.split(text)
    return "".join(part if at % 2 else visible(part) for at, part in enumerate(parts))


class Terminal(Console):
    """Rich's console, for texts of anybody."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Segments, harmless; those that control the terminal are Rich's own."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
