"""Weights that go from one process to others through memory that they share."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from rollpacker.runtime.messages import shared_weights
from rollpacker.runtime.messages.shared_weights import SharedWeights, WeightsOut, clear

NAME = f"rollpacker-test-{os.getpid()}"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """All bit patterns that random bytes make: NaN, infinities and denormals too."""
    made = torch.Generator().manual_seed(seed)
    shapes: list[tuple[torch.dtype, tuple[int, ...]]] = [
        (torch.float32, (3, 5)),
        (torch.bfloat16, (7,)),
        (torch.bfloat16, ()),
        (torch.float32, ()),
        (torch.float16, (1, 1, 13)),
        (torch.bfloat16, (129, 31)),
        (torch.float32, (0, 4)),
        (torch.int64, (3,)),
    ]
    found: dict[str, torch.Tensor] = {}
    for n, (dtype, shape) in enumerate(shapes):
        size = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=made)
        found[f"layer.{n}.wéight"] = data.view(dtype).view(shape)
    return found


def out(weights: dict[str, torch.Tensor]) -> WeightsOut:
    return WeightsOut({name: (w.dtype, w.shape) for name, w in weights.items()}, NAME)


def bits(weight: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    return weight.dtype, weight.shape, data.numpy().tobytes()


def read(shared: SharedWeights) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: bits(weight) for name, weight in shared}


def test_every_bit_arrives_again_and_again() -> None:
    written = out(tensors(0))
    shared = pickle.loads(pickle.dumps(written.shared))
    try:
        for seed in range(3):
            weights = tensors(seed)
            written.write(reversed(weights.items()))
            assert read(shared) == {name: bits(weight) for name, weight in weights.items()}
            assert [name for name, _ in shared] == [*weights]
    finally:
        shared.remove()


def test_strided_and_trained_weights_are_written_as_they_are() -> None:
    weights = {"w": torch.arange(12.0).reshape(3, 4).T.requires_grad_()}
    written = out(weights)
    try:
        written.write(weights.items())
        assert read(written.shared) == {"w": bits(weights["w"])}
    finally:
        written.shared.remove()


def test_many_read_at_once_in_their_own_memory_of_it() -> None:
    weights = tensors(1)
    written = out(weights)
    try:
        written.write(weights.items())
        with ThreadPoolExecutor(8) as readers:
            found = [*readers.map(read, [written.shared] * 8)]
        assert found == [{name: bits(weight) for name, weight in weights.items()}] * 8
    finally:
        written.shared.remove()


def test_a_reader_keeps_what_it_maps_when_the_file_is_gone() -> None:
    weights = tensors(2)
    written = out(weights)
    written.write(weights.items())
    held = dict(written.shared)
    written.shared.remove()
    written.shared.remove()
    assert not written.shared.path.exists()
    assert {name: bits(w) for name, w in held.items()} == {n: bits(w) for n, w in weights.items()}


class Full:
    """A disk without room at the first so many tries."""

    def __init__(self, tries: int) -> None:
        self.left = tries

    def __call__(self, number: int, offset: int, size: int) -> None:
        if self.left:
            self.left -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        os.truncate(number, offset + size)


def test_without_room_in_memory_it_is_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory, temporary = tmp_path / "memory", tmp_path / "temporary"
    memory.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(shared_weights, "MEMORY", memory)
    monkeypatch.setattr(shared_weights.tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(os, "posix_fallocate", Full(1))
    weights = tensors(3)
    written = out(weights)
    assert not [*memory.iterdir()]
    assert [*temporary.iterdir()] == [written.shared.path]
    written.write(weights.items())
    assert read(written.shared) == {name: bits(weight) for name, weight in weights.items()}
    clear(NAME)
    assert not [*temporary.iterdir()]


def test_without_room_anywhere_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_weights, "MEMORY", tmp_path)
    monkeypatch.setattr(shared_weights.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", Full(2))
    with pytest.raises(
        ValueError, match=r"no room for a copy of the weights \(0\.0 GB\) in"
    ) as found:
        out(tensors(4))
    assert len(str(found.value).splitlines()) == 1
    assert not [*tmp_path.iterdir()]


_READER = """
import pickle, sys, psutil
import torch
shared = pickle.loads(bytes.fromhex(sys.argv[1]))
process = psutil.Process()
before = process.memory_info()
total = sum(int(w.view(torch.uint8).max()) for _, w in shared)
after = process.memory_info()
own = lambda m: m.rss - m.shared
print(total, (own(after) - own(before)) // 2**20)
"""


def test_readers_need_no_memory_of_their_own_and_a_writer_that_of_few_tensors() -> None:
    """128 MB in 32 tensors, each made as it is written; allocators keep a few."""
    size = 4 * 2**20
    layout = {f"w{n}": (torch.uint8, torch.Size([size])) for n in range(32)}
    written = WeightsOut(layout, NAME)
    try:
        own: list[int] = []
        process = psutil.Process()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name in layout:
                made = torch.full((size,), 3, dtype=torch.uint8)
                memory = process.memory_info()
                own.append(memory.rss - memory.shared)
                yield name, made

        before = process.memory_info()
        written.write(weights())
        assert max(own) - (before.rss - before.shared) < 6 * size
        command = [sys.executable, "-c", _READER, pickle.dumps(written.shared).hex()]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert int(said[0]) == 96
        assert int(said[1]) < 8
    finally:
        written.shared.remove()
