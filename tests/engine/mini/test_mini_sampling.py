"""Distributions, streams and stop conditions of the built-in engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_models import build, drain, prompt, request

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.base import StopWatcher, uniforms
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.runner import shape_of
from rollpacker.engine.mini.torch_runner import TorchRunner
from rollpacker.engine.sampling.race import draw_token

MODEL = build("qwen2")
DRAWS = 3000


class Letters:
    """A tokenizer whose token 7 is two letters and whose token 9 needs its neighbour."""

    def decode(self, tokens: list[int]) -> str:
        text = bytes(b for t in tokens for b in self._bytes(t))
        return text.decode("utf-8", errors="replace")

    @staticmethod
    def _bytes(token: int) -> bytes:
        match token:
            case 7:
                return b"xy"
            case 8:
                return "é".encode()[:1]
            case 9:
                return "é".encode()[1:]
            case _:
                return bytes([97 + token % 26])


def make(path: str) -> MiniEngine:
    config = MiniEngineConfig(max_running=256, kv_tokens=1 << 15)
    if path == "numba":
        return MiniEngine(MODEL, config=config, tokenizer=Letters())
    runner = TorchRunner(MODEL, shape_of(MODEL), block_size=16, deterministic=False)
    return MiniEngine(MODEL, config=config, tokenizer=Letters(), runner=runner)


def first_token_probabilities(tokens, temperature, top_k, top_p):
    """The renormalised distribution, written down from its definition."""
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        logits = MODEL(ids).logits[0, -1].double() / temperature
    p = logits.softmax(-1).numpy()
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


CUTS = [(1.0, 0, 1.0), (2.0, 0, 0.8), (1.5, 5, 1.0), (2.5, 12, 0.7)]
"""Temperature, top_k, top_p; the second and third are each a half of the last."""


@pytest.mark.parametrize(
    ("path", "temperature", "top_k", "top_p"),
    [
        pytest.param(path, *cut, marks=pytest.mark.wide if path == "torch" and 0 < n < 3 else ())
        for path in ("numba", "torch")
        for n, cut in enumerate(CUTS)
    ],
)
def test_samples_follow_the_distribution(path, temperature, top_k, top_p):
    engine = make(path)
    tokens = prompt(6)
    p = first_token_probabilities(tokens, temperature, top_k, top_p)
    engine.submit(
        [
            request(
                i,
                tokens,
                group="g",
                seed=i,
                max_tokens=1,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
            )
            for i in range(DRAWS)
        ]
    )
    outputs = list(drain(engine).values())
    counts = np.bincount([o.tokens[0] for o in outputs], minlength=len(p))
    assert not counts[p == 0].any()
    expected = p * DRAWS
    likely = expected > 5
    chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = likely.sum()
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)
    for output in outputs[:50]:
        assert output.logprobs[0] == pytest.approx(np.log(p[output.tokens[0]]), abs=1e-4)


def test_it_draws_with_the_seeds_stream():
    engine = make("numba")
    tokens = prompt(6)
    logits = np.log(first_token_probabilities(tokens, 1.0, 0, 1.0)).astype(np.float32)
    engine.submit([request(i, tokens, group="g", seed=i, max_tokens=1) for i in range(50)])
    for i, output in drain(engine).items():
        u = np.random.Generator(np.random.Philox(key=i)).random()
        assert output.tokens[0] == draw_token(logits, 1.0, 0, 1.0, u)[0]


def test_streams_are_the_generators_in_pieces():
    whole = np.random.Generator(np.random.Philox(key=2**62 + 5)).random(256)
    pieces = [uniforms(2**62 + 5, start, 64) for start in (0, 64, 128, 192)]
    assert np.concatenate(pieces).tolist() == whole.tolist()


@pytest.mark.parametrize("path", ["numba", "torch"])
def test_stop_token_ids_end_a_response(path):
    engine = make(path)
    plain = request(0, prompt(6), seed=5, max_tokens=60)
    engine.submit([plain])
    free = drain(engine)[0].tokens.tolist()
    stop = free[20]
    first = free.index(stop)
    more = tuple(t for t in range(101) if t not in free)[:6]
    engine.submit([request(0, prompt(6), seed=5, max_tokens=60, stop_token_ids=(*more, stop))])
    stopped = drain(engine)[0]
    assert stopped.tokens.tolist() == free[: first + 1]
    assert stopped.finish_reason == "stop"
    engine.submit(
        [request(0, prompt(6), seed=5, max_tokens=60, stop_token_ids=(stop,), ignore_stop=True)]
    )
    forced = drain(engine)[0]
    assert (forced.tokens.tolist(), forced.finish_reason) == (free, "length")


def test_stop_at_the_last_token_is_a_stop():
    engine = make("numba")
    engine.submit([request(0, prompt(6), seed=5, max_tokens=3)])
    last = int(drain(engine)[0].tokens[-1])
    engine.submit([request(0, prompt(6), seed=5, max_tokens=3, stop_token_ids=(last,))])
    assert drain(engine)[0].finish_reason == "stop"


def test_stop_strings_end_a_response():
    engine = make("numba")
    engine.submit([request(0, prompt(6), seed=5, max_tokens=60)])
    free = drain(engine)[0].tokens
    text = Letters().decode(free[20:22].tolist())
    engine.submit([request(0, prompt(6), seed=5, max_tokens=60, stop=("#", text))])
    stopped = drain(engine)[0]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens.tolist() == free[: len(stopped.tokens)].tolist()
    decoded = Letters().decode(stopped.tokens.tolist())
    assert text in decoded
    assert text not in Letters().decode(stopped.tokens[:-1].tolist())


def test_stop_strings_need_a_tokenizer():
    engine = MiniEngine(MODEL, config=MiniEngineConfig(max_running=2, kv_tokens=256))
    with pytest.raises(ValueError, match="tokenizer"):
        engine.submit([request(0, prompt(4), stop=("x",))])


@pytest.mark.parametrize("stop", ["ab", "é", "bcde" * 5, "y"])
def test_watcher_finds_what_the_whole_text_holds(stop):
    rng = np.random.default_rng(0)
    tokenizer = Letters()
    for _ in range(30):
        tokens = rng.choice([0, 1, 2, 3, 4, 7], 400).tolist()
        at = int(rng.integers(0, 300))
        if stop == "é":
            tokens[at:at] = [8, 9]
        elif stop != "y":
            tokens[at:at] = [ord(c) - 97 for c in stop]
        found = watched_length(tokenizer, stop, tokens)
        expected = next(
            n for n in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:n])
        )
        assert found == expected


class Bytes:
    """A tokenizer of bytes, of which some are no character."""

    def __init__(self):
        self.decoded = 0

    def decode(self, tokens: list[int]) -> str:
        self.decoded += len(tokens)
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("stop", ["b", "ab", "é", "b🦙é", "a" * 30])
@pytest.mark.parametrize(
    "before",
    [
        b"\xe2" * 100 + b"c",
        b"\xe2" * 1000,
        b"\xf0\x9f" * 150 + "🦙".encode() * 40,
        "🦙ñ".encode() * 30 + b"\xb1" * 70 + b"\xf0\x9f\xa6",
    ],
    ids=["one character behind many", "no character", "torn ones", "stray ends"],
)
def test_watcher_comes_through_bytes_that_are_no_characters(before, stop):
    tokens = [*before, *b"x", *stop.encode(), *b"yz"]
    tokenizer = Bytes()
    found = watched_length(tokenizer, stop, tokens)
    assert found == len(before) + 1 + len(stop.encode())
    assert tokenizer.decoded <= 350 * len(tokens)  # of those windows, however many came before


def test_watcher_looks_behind_the_turns_before():
    tokenizer = Letters()
    tokens = np.array([0, 1, 2, 3, 0, 1, 2, 0], np.int32)
    watcher = StopWatcher(tokenizer, ("abc",), start=2)
    found = [n for n in range(3, len(tokens) + 1) if watcher.found(tokens[:n])]
    assert found[0] == 7


def watched_length(tokenizer, stop, tokens):
    watcher = StopWatcher(tokenizer, (stop,))
    array = np.array(tokens, np.int32)
    return next(n for n in range(1, len(tokens) + 1) if watcher.found(array[:n]))
