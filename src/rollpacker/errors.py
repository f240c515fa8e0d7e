"""What a user's code raised, in one line with the place in that code."""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
import unicodedata
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent) + os.sep
_LIBRARIES = tuple(
    sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_LONGEST = 400
_UNSAFE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Categories of characters that a terminal may obey, or does not show."""


class PlainError(RuntimeError):
    """One whose text is for the user as it is."""


def words_of(error: BaseException) -> str:
    """What an exception says, in one line."""
    return " ".join(str(error).split())


def first_line(error: BaseException) -> str:
    """What it says first; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """An exception as one line of bounded length, without its place."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return visible(" ".join(f"{type(error).__name__}: {text}".split())[:_LONGEST])


def visible(text: str, kept: str = "\n\t") -> str:
    """A text with an escape (``\\x1b``) in the place of each character that would do something to a
    terminal, but for ``kept``."""
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode("ascii")
        if unicodedata.category(char) in _UNSAFE and char not in kept
        else char
        for char in text
    )


def told(error: BaseException) -> str:
    """An exception as one line: ``my_rewards.py:12 in score: KeyError: 'answer'``."""
    if isinstance(error, PlainError):
        return visible(words_of(error)[:_LONGEST])
    place = _place(error)
    return one_line(error) if place is None else f"{place}: {one_line(error)}"


def way(error: BaseException) -> str:
    """What faults of one kind have in common: the type and the place, not the words."""
    return f"{type(error).__name__} {_place(error)}"


def _place(error: BaseException) -> str | None:
    """Where the user's code was when it was raised: the innermost line that is no library's."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{shown(error.filename)}:{error.lineno}"
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    others = [f for f in frames if not f[0].startswith(("<", _OURS))]
    theirs = [f for f in others if not f[0].startswith(_LIBRARIES)] or others
    if not theirs:
        return None
    file, line, name = theirs[-1]
    return f"{shown(file)}:{line}" + ("" if name.startswith("<") else f" in {name}")


def defined(target: Any) -> str | None:
    """Where a function is defined, or how its objects are called."""
    call = target if inspect.isroutine(target) else type(target).__call__
    code = getattr(inspect.unwrap(call), "__code__", None)
    return None if code is None else f"{shown(code.co_filename)}:{code.co_firstlineno}"


def shown(file: str) -> str:
    """A path as the user would write it: short where it is below the working directory."""
    here = os.getcwd() + os.sep
    return file.removeprefix(here)
