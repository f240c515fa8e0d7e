"""What a path of a configuration can be: something here, or a name on the hub."""

from __future__ import annotations


def only_here(path: str) -> bool:
    """Whether it cannot be a name on the hub, which has one slash at most."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1
