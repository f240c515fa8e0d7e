"""What decoding ahead would have brought on responses of others."""

import numpy as np

from rollpacker.core.types import PromptId
from rollpacker.engine.drafts import Rehearsal

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
