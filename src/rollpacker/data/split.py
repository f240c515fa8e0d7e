"""Rows held out of training to measure it: the same ones in every run of a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from rollpacker.core.types import PromptId
from rollpacker.data.base import DataError, Row
from rollpacker.data.load import canonical


def hold_out(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split ``rows`` into those to train on and about ``fraction`` of them held out, in order.

    Whether a row is held out depends on the seed and the row's id alone, so that runs with more
    rows, and later ones, agree. Rows with one prompt stay together: what is measured was not
    trained on. Raises ``DataError`` when either part would be empty.
    """
    key = f"held out/{seed}".encode()
    limit = int(fraction * 2**64)
    first: dict[str, PromptId] = {}
    parts: tuple[list[Row], list[Row]] = ([], [])
    for row in rows:
        name = first.setdefault(canonical(row.prompt), row.id)
        digest = hashlib.blake2b(name.encode(), key=key, digest_size=8).digest()
        parts[int.from_bytes(digest) < limit].append(row)
    training, held_out = parts
    if not held_out:
        raise DataError(
            f"eval.fraction={fraction:g} holds out none of {len(rows)} rows: raise it, or name "
            "problems in eval.data"
        )
    if not training:
        raise DataError(f"eval.fraction={fraction:g} leaves none of {len(rows)} rows: lower it")
    return training, held_out
