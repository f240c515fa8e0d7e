"""What in a configuration may be a secret: options of rewards and environments are a user's own.

A file that a run needs again has them, for its owner alone; whatever is shown has stars.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

_NAME = re.compile(
    r"((^|[.-])key|(^|[_.-])(auth|pass)|token|secret|passw(or)?d|passphrase|credential|bearer|"
    r"(api|access|secret|private|openai|anthropic|azure|wandb|service)[_-]?key|authorization|cookie)"
    r"s?([_-]?\d+)?$"
)
_NO_SECRETS = {"stale_tokens"}
"""Keys of a run's configuration that only look like one."""
_TEXT = re.compile(
    r"\b((sk|hf|gh[opsur]|github_pat|glpat|xox[abp])[-_][A-Za-z0-9_-]{12,}|AKIA[A-Z0-9]{12,})|"
    r"://[^/@\s]+:[^/@\s]+@"
)
"""What keys of well-known services, and addresses with a password, look like."""
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
STARS = "***"


def masked(value: Any, name: str = "") -> Any:
    """A plain tree with stars in the place of what may be a secret, by its name or its look."""
    if isinstance(value, Mapping):
        tree = cast(Mapping[str, Any], value)
        return {key: masked(each, str(key)) for key, each in tree.items()}
    if isinstance(value, list | tuple):
        return [masked(each, name) for each in cast(Sequence[Any], value)]
    secret = isinstance(value, str) and bool(value) and (_names(name) or _TEXT.search(value))
    return STARS if secret else value


def _names(name: str) -> bool:
    key = _HUMP.sub("_", name).lower()
    return key.rpartition(".")[2] not in _NO_SECRETS and bool(_NAME.search(key))


def masked_command(arguments: Sequence[str]) -> list[str]:
    """The same of a program's arguments: ``--api-key abc``, ``rewards.0.options.api_key=abc``."""
    shown: list[str] = []
    flag = ""
    for text in arguments:
        name, equals, value = text.partition("=")
        if equals:
            shown.append(f"{name}={masked(value, name)}")
        else:
            shown.append(text if text.startswith("-") else masked(text, flag))
        flag = text if text.startswith("-") and not equals else ""
    return shown
