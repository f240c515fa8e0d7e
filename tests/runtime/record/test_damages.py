"""Random damage to any file of a stopped run: it goes on exactly, or refuses in one line."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from runtime_jobs import Workshop, kept_samples, metrics, run, weights_digest

FIXED = {"deterministic": True, "devices__per_node": 1, "checkpoint": {"every": 1, "keep": 3}}
STOPPED, STEPS = 2, 3
DAMAGES = 30
FAST = (0, 5)
"""To a checkpoint's weights and to the journal."""


def flip(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def zero(data: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(data))
    end = rng.randrange(begin, len(data)) + 1
    return data[:begin] + bytes(end - begin) + data[end:]


def append(data: bytes, rng: random.Random) -> bytes:
    return data + rng.randbytes(rng.randrange(1, 100))


CHANGES: list[Callable[[bytes, random.Random], bytes]] = [flip, truncate, zero, append]


def damage(folder: Path, rng: random.Random) -> Path:
    """Change or delete one file; large and small ones are as likely as each other."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    victim = rng.choice([path for path in files if path.stat().st_size])
    how = rng.randrange(len(CHANGES) + 1)
    if how == len(CHANGES):
        victim.unlink()
    else:
        victim.write_bytes(CHANGES[how](victim.read_bytes(), rng))
    return victim.relative_to(folder)


shop = Workshop.fixture(rows=11)


@pytest.fixture(scope="module")
def whole(shop: Workshop) -> Path:
    return run(shop.config("whole", "race", steps=STEPS, **FIXED))[0]


@pytest.fixture(scope="module")
def stopped(shop: Workshop, whole: Path) -> Path:
    """As a kill in the last step leaves it: later lines, no later checkpoint."""
    copy = shop.folder / "stopped"
    names = (".lock", "summary.json", f"checkpoint-{STEPS}")
    return shutil.copytree(whole, copy, ignore=shutil.ignore_patterns(*names))


@pytest.mark.parametrize(
    "seed",
    [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in range(DAMAGES)],
)
def test_a_damaged_run(shop: Workshop, whole: Path, stopped: Path, seed: int) -> None:
    name = f"damaged-{seed}"
    copy = shop.folder / name
    shutil.copytree(stopped, copy, ignore=shutil.ignore_patterns(".lock"))
    victim = damage(copy, random.Random(seed))
    refused = None
    try:
        run(shop.config(name, "race", steps=STEPS, **FIXED), resume=True)
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert len(refused.splitlines()) == 1, victim
        return
    last = f"checkpoint-{STEPS}"
    assert weights_digest(copy / last) == weights_digest(whole / last), victim
    losses = [{row["step"]: row["loss"] for row in metrics(f)} for f in (copy, whole)]
    assert losses[0].items() <= losses[1].items(), victim
    assert set(losses[0]) >= set(range(STOPPED, STEPS)), victim
    if "samples" not in str(victim):
        assert kept_samples(copy) == kept_samples(whole), victim
    shutil.rmtree(copy)
