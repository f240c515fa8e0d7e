"""What a docstring says of each field, so that it is written once."""

from __future__ import annotations

import re
from inspect import cleandoc

_ARGS = re.compile(r"^Args:\n(.*?)(?:\n\n|\Z)", re.M | re.S)
_FIELD = re.compile(r"^ {4}(\w+): (.*?)(?=^ {4}\w+: |\Z)", re.M | re.S)


def args_of(kind: type[object]) -> dict[str, str]:
    """The ``Args`` section of a class: texts by name, each in one line."""
    section = _ARGS.search(cleandoc(kind.__doc__ or ""))
    found = _FIELD.findall(section[1]) if section else []
    return {name: one_line(text) for name, text in found}


def one_line(text: str) -> str:
    """Without line breaks, in Markdown."""
    return " ".join(text.split()).replace("``", "`")
