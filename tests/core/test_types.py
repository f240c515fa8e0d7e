"""Sampling seeds: the same on every machine, and spread over 63 bits."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rollpacker.core.types import PromptId, sampling_seed


def test_the_seed_of_an_attempt_never_changes_between_versions() -> None:
    assert sampling_seed(0, 1, PromptId("a"), 0) == 8_825_198_516_911_814_056


@given(
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
    prompt=st.text().map(PromptId),
    index=st.integers(0, 4096),
)
def test_a_seed_depends_on_its_arguments_only(
    seed: int, step: int, prompt: PromptId, index: int
) -> None:
    first = sampling_seed(seed, step, prompt, index)
    assert first == sampling_seed(seed, step, prompt, index)
    assert 0 <= first < 2**63


def test_neighbouring_attempts_get_unrelated_seeds() -> None:
    prompts = [PromptId(text) for text in ("0", "1", "1/0", "0/1")]
    arguments = list(product(range(4), range(8), prompts, range(8)))
    seeds = [sampling_seed(*each) for each in arguments]
    assert len(set(seeds)) == len(arguments)
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds) / len(seeds)
        assert 0.4 < share < 0.6, f"bit {bit} is set in {share:.2f} of the seeds"
