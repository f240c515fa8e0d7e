"""What is drafted, and what is kept to draft from."""

from __future__ import annotations

import numpy as np

from rollpacker.core.types import PromptId
from rollpacker.engine.drafts import LENGTHS, Drafter


def test_noise_is_hardly_drafted() -> None:
    """Uniform text: what is never right is soon tried no more."""
    drafter, random = Drafter(), np.random.default_rng(0)
    scopes = np.array([drafter.scope(PromptId("noise"))])
    text = random.integers(0, 50, (1, 4000)).astype(np.int32)
    learnt, rows, none = np.zeros((3, 1), np.int32)
    stops, most = np.full((1, 1), -1, np.int32), np.full(1, 8, np.int32)
    drafted = 0
    for end in range(1, 4000):
        ends = np.full(1, end, np.int32)
        drafter.catch_up()
        drafts, buckets, lengths = drafter.draft(
            scopes, text, rows, (learnt, ends, none), most, (0, 0.05), stops
        )
        right = np.cumprod(drafts[0, : lengths[0]] == text[0, end : end + lengths[0]]).sum()
        drafter.judge(buckets, lengths, np.array([right]))
        drafted += int(lengths[0])
    assert drafted < 0.15 * 4000


def test_tables_are_bounded() -> None:
    entries = 1 << 14
    drafter, random = Drafter(entries), np.random.default_rng(0)
    scope = drafter.scope(PromptId("a"))
    for _ in range(1000):
        drafter.ended(scope, random.integers(0, 1000, 500).astype(np.int32), 0)
        drafter.catch_up()
        drafter.turn_over()
    assert len(drafter._young.entries) + len(drafter._old.entries) <= 2 * entries
    assert drafter._young.used[0] <= entries // 2 + 500 * len(LENGTHS)
    assert not drafter._round
    assert len(drafter._past) == 1
