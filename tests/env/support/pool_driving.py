"""Drives a pool of environments as a run does, and sees that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from chat_models import make_tokenizer

from rollpacker.config import EnvironmentConfig
from rollpacker.env.messages import Begin, ModelReplied, packed
from rollpacker.env.processes.pool import EnvironmentPool, EpisodeReply

HERE = Path(__file__).parent
TOKENIZER = make_tokenizer("qwen2_5")
PROMPT = [{"role": "user", "content": "Go."}]
PATIENCE_S = 120.0
"""For what must happen."""


class Driver:
    """Begins episodes, gives them the model's replies, and takes answers.

    Args:
        pool: the processes; ready.
    """

    def __init__(self, pool: EnvironmentPool) -> None:
        self.pool = pool
        self._last = 0
        self._answers: dict[int, asyncio.Queue[EpisodeReply]] = defaultdict(asyncio.Queue)
        pool.attach(asyncio.get_running_loop(), self._take)

    def _take(self, replies: Sequence[EpisodeReply]) -> None:
        for reply in replies:
            self._answers[reply.answer.episode].put_nowait(reply)

    def begin(self, key: object = None, template: Any = None, **row: Any) -> int:
        """An episode; ``key`` is its own number if it has no other."""
        self._last += 1
        command = Begin(
            episode=self._last,
            row=packed(row),
            prompt=PROMPT,
            tools=list(self.pool.tools),
            room=10_000,
            template=template or {},
        )
        self.pool.begin(command, key or self._last)
        return self._last

    def say(self, episode: int, text: str, left: int = 10_000) -> None:
        """The model's reply."""
        ids = TOKENIZER(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        reply = np.asarray(ids, np.int32).tobytes()
        self.pool.step(ModelReplied(episode=episode, reply=reply, left=left, left_sampled=left))

    async def answer(self, episode: int) -> EpisodeReply:
        """What comes next of an episode."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._answers[episode].get()

    async def begun(self, key: object = None, **row: Any) -> int:
        """An episode whose environment waits for the model."""
        episode = self.begin(key, **row)
        reply = await self.answer(episode)
        assert not reply.answer.error, reply.answer.error
        return episode

    async def told(self, episode: int, text: str) -> EpisodeReply:
        """What an environment says to a reply."""
        self.say(episode, text)
        return await self.answer(episode)

    def silent(self, episode: int) -> bool:
        """Whether all that came of an episode was taken."""
        return self._answers[episode].empty()

    def processes(self) -> list[int]:
        """Of the pool, oldest first."""
        return [member.popen.pid for member in self.pool._members]


def children() -> list[psutil.Process]:
    """Processes of environments that this one has started."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children(recursive=True):
        # Other tests of this process may have left one that nobody has waited for yet.
        with suppress(psutil.NoSuchProcess):
            found += [child] * (child.name() == "env.worker")
    return found


def family() -> set[psutil.Process]:
    """Processes of this one, whoever has started them."""
    return set(psutil.Process().children(recursive=True))


def descriptors() -> int:
    """How many this process has open."""
    gc.collect()  # what others have left would be closed meanwhile
    return len(os.listdir("/proc/self/fd"))


def begin_server() -> None:
    """The process that forks those of environments, which stays, is not what a test has left."""
    pool_of(f"{HERE / 'unruly.py'}:double", kind="tools").close()


def pool_of(path: str, tokenizer: Any = TOKENIZER, **more: Any) -> EnvironmentPool:
    """Processes of a class or function of a file, or of what ``more`` says."""
    config = EnvironmentConfig.model_validate({"kind": "python", "path": path} | more)
    return EnvironmentPool(config, tokenizer, {})


@asynccontextmanager
async def opened(folder: Path, kind: str = "Unruly", **more: Any) -> AsyncIterator[Driver]:
    """A pool of ``unruly.py``, which writes what it does to a folder; nothing is left of it."""
    path = f"{HERE / 'unruly.py'}:{kind}"
    begin_server()
    before, others = descriptors(), family()
    pool = pool_of(path, options={"folder": str(folder)}, **more)
    started: set[psutil.Process] = set()
    try:
        pool.wait_ready()
        yield Driver(pool)
        started = family() - others
    finally:
        pool.close()
    assert not started & family()
    _, alive = psutil.wait_procs(started, timeout=PATIENCE_S)
    assert not alive
    assert descriptors() <= before
