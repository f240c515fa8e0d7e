"""Writing weights in the hub's layout while they come, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from rollpacker.checkpoint_names import Layout

_LIMIT = 5 << 30
"""Bytes of a file, unless a single weight has more."""
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def write_weights(
    folder: Path,
    layout: Layout,
    weights: Iterator[tuple[str, torch.Tensor]],
    limit: int = _LIMIT,
) -> None:
    """Write safetensors files, with an index when there are several; holds one weight at a time.

    Takes exactly as many of ``weights`` as ``layout`` has; any tensor may be a view of another.
    """
    files = _files(layout, limit)
    names = [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    if len(files) == 1:
        names = ["model.safetensors"]
    for name, held in zip(names, files, strict=True):
        _write_file(folder / name, held, weights)
    if len(files) > 1:
        places = {weight: name for name, held in zip(names, files, strict=True) for weight in held}
        size = sum(_bytes(*entry) for entry in layout.values())
        index = {"metadata": {"total_size": size}, "weight_map": places}
        text = json.dumps(index, indent=2)
        (folder / "model.safetensors.index.json").write_text(text + "\n")


def _write_file(path: Path, held: Layout, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in held.items():
        start, end = end, end + _bytes(dtype, shape)
        entry = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data is aligned
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for wanted in held:
            _append(file, wanted, *next(weights))


def _append(file: IO[bytes], wanted: str, name: str, weight: torch.Tensor) -> None:
    assert name == wanted, f"{name} came instead of {wanted}"
    data = weight.detach().cpu().contiguous().view(-1).view(torch.uint8)
    file.write(data.numpy().data)


def _files(layout: Layout, limit: int) -> list[Layout]:
    files: list[Layout] = [{}]
    used = 0
    for name, entry in layout.items():
        size = _bytes(*entry)
        if files[-1] and used + size > limit:
            files.append({})
            used = 0
        files[-1][name] = entry
        used += size
    return files


def _bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return dtype.itemsize * shape.numel()
