"""How a token is drawn: one row in numpy, many in torch, the kernel on the CPU."""

import math

import numpy as np
import pytest
import torch

from rollpacker.engine.sampling.compiled import mix as compiled_mix
from rollpacker.engine.sampling.race import (
    CHUNK,
    RowDraws,
    draw_token,
    keys,
    mix,
    numbers,
    places,
    signed,
    times,
)
from rollpacker.engine.sampling.rows import draw_by_torch, draw_rows

KINDS = [(0, 0.9), (20, 1.0), (20, 0.9), (1, 1.0), (0, 0.01), (5000, 0.999), (0, 1.0), (3, 0.999)]


def unsigned(values):
    return [int(value) % 2**64 for value in np.atleast_1d(values)]


def uniforms_of(key, place):
    return np.exp(-times(key, place))


def by_kernel(logits, temperature, uniform, top_k=0, top_p=1.0):
    """What a CPU has."""
    return drawn(draw_rows, logits, temperature, uniform, top_k, top_p)


def by_torch(logits, temperature, uniform, top_k=0, top_p=1.0):
    """What a GPU has."""
    return drawn(draw_by_torch, logits, temperature, uniform, top_k, top_p)


def drawn(by, logits, temperature, uniform, top_k, top_p):
    count = len(logits)
    draws = RowDraws(
        np.broadcast_to(temperature, count).astype(np.float32),
        np.broadcast_to(top_k, count).astype(np.int32),
        np.broadcast_to(top_p, count).astype(np.float32),
        uniform,
    )
    return [each.numpy() for each in by(torch.from_numpy(logits), draws)]


def one_by_one(logits, temperature, uniform, top_k=0, top_p=1.0):
    told = np.broadcast_arrays(temperature, top_k, np.float32(top_p), uniform)
    found = [
        draw_token(row, float(t), int(k), float(p), float(u))
        for row, t, k, p, u in zip(logits, *told, strict=True)
    ]
    return [np.array(each) for each in zip(*found, strict=True)]


def test_numbers_are_those_of_splitmix64():
    """The first of seed 1234567, as the generator's users list them."""
    golden = signed(0x9E3779B97F4A7C15)
    states = 1234567 + np.arange(1, 6) * golden
    wanted = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert unsigned(mix(states)) == wanted
    assert unsigned(mix(torch.from_numpy(states)).numpy()) == wanted
    assert [int(compiled_mix(np.uint64(int(s) % 2**64))) for s in states] == wanted


def test_arrays_and_tensors_have_the_same_numbers():
    key = keys(np.random.default_rng(0).random(50))[:, None]
    place = places(5000)
    found = numbers(key, place)
    assert found.shape == (50, CHUNK + 20)
    assert (found == numbers(torch.from_numpy(key), torch.from_numpy(place)).numpy()).all()
    assert 0 < times(key, place).min() < times(key, place).max() < 36.8


@pytest.mark.parametrize("size", [1, 18, CHUNK, CHUNK + 1, 3000])
@pytest.mark.parametrize("spread", [0.01, 3.0, 300.0])
def test_all_ways_draw_the_same(size, spread):
    random = np.random.default_rng(size)
    count = 200
    logits = random.normal(0.0, spread, (count, size)).astype(np.float32)
    temperature = random.choice([0.0, 0.25, 1.0, 2.0], count)
    uniform = random.random(count)
    wanted = one_by_one(logits, temperature, uniform)
    for by in by_kernel, by_torch:
        found = by(logits, temperature, uniform)
        assert found[0].tolist() == wanted[0].tolist()
        np.testing.assert_allclose(found[1], wanted[1], atol=2e-6 * max(spread, 1.0))


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("ties", [False, True])
def test_of_the_most_likely_all_ways_draw_the_same(spread, ties):
    """Of equal weights, where there are many, the lower ids are kept."""
    random = np.random.default_rng(3)
    count, size = 40 * len(KINDS), 1000
    logits = random.normal(0.0, spread, (count, size)).astype(np.float32)
    if ties:
        logits = np.round(logits * 4 / spread) * np.float32(spread / 4)
    top_k, top_p = (np.array(each) for each in zip(*KINDS * 40, strict=True))
    temperature = random.choice([0.0, 0.25, 1.0, 2.0], count)
    told = logits, temperature, random.random(count), top_k, top_p
    wanted = one_by_one(*told)
    for by in by_kernel, by_torch:
        found = by(*told)
        assert found[0].tolist() == wanted[0].tolist()
        np.testing.assert_allclose(found[1], wanted[1], atol=2e-6 * max(spread, 1.0))


def test_more_rows_than_are_drawn_at_a_time():
    random = np.random.default_rng(5)
    logits = random.normal(0.0, 2.0, (300, 40)).astype(np.float32)
    uniform = random.random(300)
    top_k = np.where(np.arange(300) < 140, 0, 7)
    found = by_torch(logits, 1.0, uniform, top_k)
    assert found[0].tolist() == one_by_one(logits, 1.0, uniform, top_k)[0].tolist()
    alone = [by_torch(logits[i : i + 1], 1.0, uniform[i : i + 1], top_k[i]) for i in range(300)]
    assert np.concatenate([each[0] for each in alone]).tolist() == found[0].tolist()


@pytest.mark.parametrize("uniform", [0.0, 2**-53, 1 - 2**-53])
@pytest.mark.parametrize("top_k", [0, 7])
def test_the_ends_of_the_unit_interval_are_likely_tokens(uniform, top_k):
    logits = np.random.default_rng(4).normal(0.0, 3.0, (200, 777)).astype(np.float32)
    ends = np.full(len(logits), uniform)
    tokens, logprobs = one_by_one(logits, 1.0, ends, top_k)
    assert by_torch(logits, 1.0, ends, top_k)[0].tolist() == tokens.tolist()
    assert logprobs.mean() > -12


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    """Of single tokens, of chunks, and of places within a chunk."""
    random = np.random.default_rng(6)
    size, count = 3 * CHUNK + 10, 40_000
    logits = random.normal(0.0, 1.0, size).astype(np.float32)
    shares = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    shares /= shares.sum()
    rows = np.broadcast_to(logits, (count, size))
    tokens, _ = by_kernel(rows, np.full(count, temperature), random.random(count))
    ids = np.arange(size)
    for of in ids // CHUNK, ids % CHUNK, np.argsort(np.argsort(-shares)) // 8:
        counted = np.bincount(of[tokens], minlength=of.max() + 1)
        expected = np.bincount(of, weights=shares) * count
        assert likely_chi_square(counted, expected)


def likely_chi_square(counted, expected):
    """Within five standard deviations, of classes that are expected often enough."""
    often = expected > 10
    found = ((counted - expected)[often] ** 2 / expected[often]).sum()
    degrees = often.sum() - 1
    return abs(found - degrees) < 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("apart", [1, 2, 255, 256, 257])
def test_neighbours_are_independent(apart):
    """Numbers of one key, places ``apart``: each pair of sixteenths is as frequent."""
    key = keys(np.random.default_rng(7).random(400))[:, None]
    first = uniforms_of(key, places(150_000))
    pairs = (first[:, :-apart] * 16).astype(int) * 16 + (first[:, apart:] * 16).astype(int)
    counted = np.bincount(pairs.ravel(), minlength=256)
    assert likely_chi_square(counted, np.full(256, pairs.size / 256))


def test_neighbouring_uniforms_are_independent():
    """Keys that differ in their last bit, and where the next number of one could be another's."""
    base = (np.arange(1, 300_000) * 2.0**-53)[:, None]
    found = uniforms_of(keys(base), places(2))
    for one, other in (
        (found[:-1, 0], found[1:, 0]),
        (found[:-1, 1], found[1:, 0]),
        (found[:-1, 0], found[1:, 1]),
    ):
        pairs = (one * 16).astype(int) * 16 + (other * 16).astype(int)
        counted = np.bincount(pairs, minlength=256)
        assert likely_chi_square(counted, np.full(256, pairs.size / 256))


@pytest.mark.parametrize("draws", [by_kernel, by_torch])
def test_rounding_moves_a_draw_as_seldom_as_it_moves_the_distribution(draws):
    """Noise of 1e-3 on logits moves a share of the draws that is near the total variation; a
    running sum would move it by the noise of all tokens before, some 30 times as often."""
    random = np.random.default_rng(8)
    count, size = 1000, 10_000
    logits = 2 * random.standard_normal((count, size), np.float32)
    other = logits + np.float32(1e-3) * random.standard_normal((count, size), np.float32)
    shares = [torch.from_numpy(each).softmax(-1) for each in (logits, other)]
    least = float((shares[0] - shares[1]).abs().sum(-1).mean()) / 2
    uniform, temperature = random.random(count), np.ones(count)
    one, two = (draws(each, temperature, uniform)[0] for each in (logits, other))
    moved = int((one != two).sum())
    assert moved <= 2 * least * count + 4
