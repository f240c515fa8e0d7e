"""Top-k and top-p over many rows at once: the tokens of one row at a time."""

import numpy as np
import pytest
import torch

from rollpacker.engine.mini.cpu.draw import restricted_draw
from rollpacker.engine.nucleus_rows import restricted_draws

KINDS = [(0, 0.9), (20, 1.0), (20, 0.9), (1, 1.0), (0, 0.01), (5000, 0.999), (0, 1.0), (3, 0.999)]


def drawn(logits, temperature, top_k, top_p, uniform):
    """Token and logprob of each row, by both."""
    ones = [
        restricted_draw(row, float(t), int(k), float(p), float(u))
        for row, t, k, p, u in zip(logits, temperature, top_k, top_p, uniform, strict=True)
    ]
    rows = restricted_draws(*map(torch.from_numpy, (logits, temperature, top_k, top_p, uniform)))
    return np.array(ones).T, [each.numpy() for each in rows]


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("ties", [False, True])
def test_they_are_those_of_single_rows(spread, ties):
    """Of equal weights, where there are many, the lower ids are kept."""
    random = np.random.default_rng(3)
    count, size = 40 * len(KINDS), 1000
    logits = random.normal(0.0, spread, (count, size)).astype(np.float32)
    if ties:
        logits = np.round(logits * 4 / spread) * np.float32(spread / 4)
    top_k, top_p = (np.array(each) for each in zip(*KINDS * 40, strict=True))
    temperature = random.choice([0.3, 1.0, 2.0], count)
    ones, rows = drawn(logits, temperature, top_k, top_p, random.random(count))
    assert rows[0].tolist() == ones[0].tolist()
    np.testing.assert_allclose(rows[1], ones[1], atol=1e-9)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_are_kept_tokens(uniform):
    logits = np.random.default_rng(4).normal(0.0, 3.0, (200, 777)).astype(np.float32)
    count = len(logits)
    settings = np.ones(count), np.full(count, 7), np.full(count, 0.95), np.full(count, uniform)
    ones, rows = drawn(logits, *settings)
    assert rows[0].tolist() == ones[0].tolist()
