"""What is drafted, and what is kept to draft from."""

from __future__ import annotations

import numpy as np

from rollpacker.core.types import PromptId
from rollpacker.engine.drafts import LENGTHS, Drafter, Rehearsal


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


# What decoding ahead would have brought on responses of others.


ONE, TWO = PromptId("one"), PromptId("two")


def noise(seed: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).astype(np.int32)


def test_texts_that_repeat_themselves_are_decoded_many_tokens_at_a_time() -> None:
    rehearsal = Rehearsal()
    rehearsal.step({ONE: [np.tile(noise(0, 20), 30)], TWO: [noise(1, 40)]})
    assert rehearsal.decoded == 600
    assert rehearsal.tokens > 5.0
    assert 5 < rehearsal.draft <= 16


def test_noise_is_decoded_a_token_at_a_time() -> None:
    rehearsal = Rehearsal()
    for seed in range(3):
        rehearsal.step({ONE: [noise(seed, 500)]})
    assert rehearsal.tokens < 1.05


def test_earlier_steps_siblings_and_the_last_visit_are_drafted_from() -> None:
    text, cold = noise(2, 300), Rehearsal()
    cold.step({ONE: [text]})
    assert cold.steps == 300
    for before, again in (
        ([{TWO: [text]}], {ONE: [text]}),
        ([{ONE: [text, noise(3, 10)]}, {TWO: [noise(4, 10)]}], {ONE: [text]}),
        ([], {ONE: [np.concatenate([noise(5, 320), text]), text]}),
    ):
        rehearsal = Rehearsal()
        for step in before:
            rehearsal.step(step)
        already = rehearsal.steps
        rehearsal.step(again)
        longest = max(map(len, again[ONE]))
        assert rehearsal.steps - already < longest - 250


def test_a_sibling_is_known_as_far_as_it_was() -> None:
    """Both have run equally far: nothing is known of what comes."""
    text, rehearsal = noise(6, 300), Rehearsal()
    rehearsal.step({ONE: [text, text[:299]]})
    assert rehearsal.steps > 290


def test_it_begins_where_few_still_run() -> None:
    rehearsal = Rehearsal()
    rehearsal.step({ONE: [noise(n, 100 + n) for n in range(20)]})
    assert rehearsal.decoded == 119 // 4
    rehearsal.step({ONE: [noise(n, 100 * n) for n in range(20)]})
    assert rehearsal.decoded == 119 // 4 + 1900 - 1100
    rehearsal.step({ONE: [], TWO: [noise(0, 0)]})
    assert rehearsal.decoded == 119 // 4 + 1900 - 1100
