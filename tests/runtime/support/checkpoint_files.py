"""What the tests of checkpoints write and look for."""

import os
import random

from rollpacker.runtime.record.checkpoint import Checkpoints


def writer(step, size=300):
    """A model and an optimizer whose bytes depend on the step alone."""

    def write(folder):
        numbers = random.Random(step)
        for name in ("config.json", "model.safetensors", "optimizer/rank0/shard.bin"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(numbers.randbytes(size))

    return write


def intact(found, size=300):
    numbers = random.Random(found.state["seed"])
    return all(
        (found.path / name).read_bytes() == numbers.randbytes(size)
        for name in ("config.json", "model.safetensors", "optimizer/rank0/shard.bin")
    )


def save(checkpoints, step, write, state):
    """Write and commit a checkpoint; returns its folder."""
    checkpoints.write(step, write, state)
    return checkpoints.commit(step)


def saved(folder, *steps, keep=2):
    checkpoints = Checkpoints(folder, keep)
    for step in steps:
        save(checkpoints, step, writer(step), {"seed": step})
    return checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def child(act):
    """Run ``act`` in a forked process and return its exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(77)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
