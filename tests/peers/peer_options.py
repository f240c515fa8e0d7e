"""The cases: each algorithm with its options, as we, TRL and verl are told them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from case_files import read_table


@dataclass(frozen=True)
class Case:
    """One algorithm with its options, as each of the three calls it.

    Args:
        name: of the row in docs/compatibility.md.
        ours: the section ``train``.
        trl: arguments of TRL's configuration; None where it has no such thing.
        verl: see ``test_verl.py``; None where it has no such thing.
        drift: scale of the update since the responses were sampled; 0 is on-policy.
        unscored: one response has no reward.
        noise: by how much what the sampler says is off, nats.
    """

    name: str
    ours: dict[str, Any]
    trl: dict[str, Any] | None = None
    verl: dict[str, Any] | None = None
    drift: float = 0.5
    unscored: bool = True
    noise: float = 0.0


TRL_CASES = tuple(Case(**row) for row in read_table(__file__, "trl"))
VERL_CASES = tuple(Case(**row, unscored=False) for row in read_table(__file__, "verl"))
