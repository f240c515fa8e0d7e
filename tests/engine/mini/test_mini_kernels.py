"""The compiled kernels against what they are defined to compute."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_models import build, drain, prompt, request
from numba import njit

from rollpacker.config import MiniEngineConfig
from rollpacker.engine.mini import MiniEngine
from rollpacker.engine.mini.cpu.kernels import (
    add_bias,
    decode,
    encode,
    gate,
    multiply,
    normalise,
    rotate,
    softmax,
    start_rows,
    write_kv,
)
from rollpacker.engine.mini.cpu.lanes import COLUMNS
from rollpacker.engine.sampling.compiled import draw, exponentials
from rollpacker.engine.sampling.race import draw_token


@njit
def compiled(values, stored, back):
    for i in range(len(values)):
        stored[i] = encode(stored, values[i])
        back[i] = decode(stored[i])


def floats() -> np.ndarray:
    """Of all magnitudes and signs, with ties between two bfloat16, zeros and infinities."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F7F_0000, 2000, dtype=np.uint32)
    bits[:500] = bits[:500] & 0xFFFF_0000 | 0x8000
    found = bits.view(np.float32) * rng.choice([-1, 1], 2000).astype(np.float32)
    return np.concatenate([found, np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stored_elements_round_as_in_torch(dtype):
    values = floats()
    rounded = torch.from_numpy(values).to(dtype)
    expected = rounded.numpy() if dtype == torch.float32 else rounded.view(torch.uint16).numpy()
    stored, back = np.empty_like(expected), np.empty_like(values)
    compiled(values, stored, back)
    assert stored.tobytes() == expected.tobytes()
    assert back.tobytes() == rounded.float().numpy().tobytes()
    plain = np.array([encode(stored, value) for value in values])
    assert plain.tobytes() == expected.tobytes()
    assert np.array([decode(e) for e in plain]).tobytes() == back.tobytes()


@pytest.mark.parametrize("max_running", [1, 5, 16])
def test_bfloat16_results_do_not_depend_on_the_batch(max_running):
    engine = MiniEngine(
        build("qwen3", share=3).bfloat16(),
        config=MiniEngineConfig(max_running=max_running, kv_tokens=640),
    )
    requests = [
        request(i, prompt(3 + 9 * (i % 4), i % 4), group=str(i % 4), seed=i, ignore_stop=True)
        for i in range(16)
    ]
    engine.submit(requests)
    together = drain(engine)
    for each in requests:
        engine.submit([each])
        alone = drain(engine)[each.attempt]
        assert alone.tokens.tobytes() == together[each.attempt].tokens.tobytes()
        assert alone.logprobs.tobytes() == together[each.attempt].logprobs.tobytes()


# Kernels give the same bits wherever their arrays lie in memory.


GAPS = (0, 4, 16, 36, 64, 100, 252, 256, 1024)
"""Bytes between one array and the next, at least."""
STARTS = (0, 4, 20, 60)
"""Bytes that the first lies behind a multiple of 64."""
SIZES = (37, 256, 1000)
EPS = np.float32(1e-6)
_RNG = np.random.default_rng(0)

Arrays = dict[str, np.ndarray]
Kernel = Callable[[Arrays], Any]


def numbers(*shape: int) -> np.ndarray:
    return (3 * _RNG.normal(size=shape)).astype(np.float32)


def placed(arrays: Arrays, order: tuple[str, ...], start: int, gap: int) -> Arrays:
    """Copies of the arrays, in one block, in this order."""
    block = np.zeros(sum(a.nbytes for a in arrays.values()) + len(order) * gap + 256, np.uint8)
    at = -block.ctypes.data % 64 + start
    views: Arrays = {}
    for name in order:
        size = arrays[name].nbytes
        view = block[at : at + size].view(arrays[name].dtype).reshape(arrays[name].shape)
        view[...] = arrays[name]
        views[name] = view
        at += size + gap + -gap % arrays[name].itemsize
    return views


def run(kernel: Kernel, arrays: Arrays, placement: tuple[tuple[str, ...], int, int]) -> bytes:
    views = placed(arrays, *placement)
    result = kernel(views)
    returned = b"" if result is None else np.asarray(result).tobytes()
    return returned + b"".join(views[name].tobytes() for name in arrays)


def exponentials_of(size: int) -> tuple[Kernel, Arrays]:
    arrays = {"row": numbers(size), "weights": numbers(size), "sums": numbers(-(-size // 256))}
    inverse = np.float32(0.7)
    return lambda a: exponentials(a["row"], inverse, a["weights"], a["sums"]), arrays


def draw_of(size: int) -> tuple[Kernel, Arrays]:
    arrays = {
        "logits": numbers(3, -(-size // COLUMNS) * COLUMNS),
        "rows": np.array([0, 1, 2, 1], np.int32),
        "uniforms": _RNG.random(4),
        "temperatures": np.array([1.0, 0.7, 0.0, 1.3], np.float32),
        "tokens": np.zeros(4, np.int32),
        "logprobs": np.zeros(4, np.float32),
    }
    return (
        lambda a: draw(
            a["logits"],
            size,
            a["rows"],
            a["uniforms"],
            a["temperatures"],
            a["tokens"],
            a["logprobs"],
        ),
        arrays,
    )


def softmax_of(size: int, dtype: type = np.float32) -> tuple[Kernel, Arrays]:
    padded = -(-size // 16) * 16
    arrays = {"scores": numbers(padded), "out": np.zeros(padded, dtype)}
    return lambda a: softmax(a["scores"], size, padded, a["out"]), arrays


def normalise_of(size: int, dtype: type = np.float32) -> tuple[Kernel, Arrays]:
    arrays = {"x": numbers(size), "gain": numbers(size), "out": np.zeros(size, dtype)}
    return lambda a: normalise(a["x"], a["gain"], EPS, a["out"]), arrays


def gate_of(size: int, dtype: type = np.float32) -> tuple[Kernel, Arrays]:
    arrays = {"x": numbers(2 * size), "out": np.zeros(size, dtype)}
    return lambda a: gate(a["x"], size, a["out"]), arrays


def rotate_of(size: int) -> tuple[Kernel, Arrays]:
    even = size // 2 * 2
    arrays = {name: numbers(even) for name in ("x", "gain", "cos", "sin", "out")}
    scale = np.float32(0.3)
    return (lambda a: rotate(a["x"], a["gain"], EPS, a["cos"], a["sin"], scale, a["out"]), arrays)


def multiply_of(size: int) -> tuple[Kernel, Arrays]:
    arrays = {
        "a": numbers(5, size),
        "w": numbers(2 * COLUMNS * size),
        "out": numbers(5, 2 * COLUMNS),
    }
    return lambda a: multiply(a["a"], a["w"], 0, a["out"]), arrays


def rows_of(size: int) -> tuple[Kernel, Arrays]:
    arrays = {"out": numbers(2, size), "bias": numbers(size)}

    def both(a: Arrays) -> None:
        start_rows(a["out"], a["bias"], 1)
        add_bias(a["out"], a["bias"], 2)

    return both, arrays


def write_of(size: int) -> tuple[Kernel, Arrays]:
    padded = -(-size // COLUMNS) * COLUMNS
    arrays = {"k": numbers(size), "v": numbers(size)}
    arrays |= {name: numbers(2 * padded * 16) for name in ("keys", "values")}
    return lambda a: write_kv(a["k"], a["v"], a["keys"], a["values"], padded * 16, 5, 1), arrays


def nucleus_of(size: int) -> tuple[Kernel, Arrays]:
    return lambda a: draw_token(a["logits"], 0.8, 20, 0.9, 0.6), {"logits": numbers(size)}


BFLOAT = np.uint16
KERNELS: dict[str, Callable[[int], tuple[Kernel, Arrays]]] = {
    "exponentials": exponentials_of,
    "draw": draw_of,
    "softmax": softmax_of,
    "softmax-bfloat16": lambda size: softmax_of(size, BFLOAT),
    "normalise": normalise_of,
    "normalise-bfloat16": lambda size: normalise_of(size, BFLOAT),
    "gate": gate_of,
    "gate-bfloat16": lambda size: gate_of(size, BFLOAT),
    "rotate": rotate_of,
    "multiply": multiply_of,
    "rows": rows_of,
    "write_kv": write_of,
    "nucleus": nucleus_of,
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_does_not_see_where_its_arrays_lie(name: str) -> None:
    for size in SIZES:
        kernel, arrays = KERNELS[name](size)
        every = list(itertools.permutations(arrays))
        orders = every[:: max(1, len(every) // 6)]
        wanted = run(kernel, arrays, (tuple(arrays), 0, 4096))
        for placement in itertools.product(orders, STARTS, GAPS):
            assert run(kernel, arrays, placement) == wanted, (size, placement)
