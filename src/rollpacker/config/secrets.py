"""What in a configuration may be a secret: options of rewards and environments are a user's own.

A file that a run needs again has them, for its owner alone; whatever is shown has stars.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

_NAME = re.compile(
    r"(^|[_.-])(key|token|secret|pass(word|wd|phrase)?|credentials?|auth(orization)?|bearer|cookie)s?$"
)
_TEXT = re.compile(r"\b(sk|hf|ghp|glpat|xox[bp]|AKIA)[-_]?[A-Za-z0-9_-]{12,}|://[^/@\s]+:[^/@\s]+@")
"""What keys of well-known services, and addresses with a password, look like."""
STARS = "***"


def masked(value: Any, name: str = "") -> Any:
    """A plain tree with stars in the place of what may be a secret, by its name or its look."""
    if isinstance(value, Mapping):
        tree = cast(Mapping[str, Any], value)
        return {key: masked(each, str(key)) for key, each in tree.items()}
    if isinstance(value, list | tuple):
        return [masked(each, name) for each in cast(Sequence[Any], value)]
    if isinstance(value, str) and value and (_NAME.search(name.lower()) or _TEXT.search(value)):
        return STARS
    return value


def masked_argument(text: str) -> str:
    """The same of a program's argument: ``--api-key=...``, ``rewards.0.options.api_key=...``."""
    name, equals, value = text.partition("=")
    return f"{name}={masked(value, name)}" if equals else masked(text)
