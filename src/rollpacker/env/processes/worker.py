"""The process of environments: the only place where they run, many at a time in one event loop.

It takes commands in order and answers each ``Begin`` and ``ModelReplied`` once. The driver checks
its messages and never unpickles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import Factory
from rollpacker.env.episode import Episode
from rollpacker.env.load import load
from rollpacker.env.messages import (
    Begin,
    Close,
    Command,
    EnvironmentAnswer,
    EnvironmentReady,
    Fatal,
    ModelReplied,
    whole,
)
from rollpacker.env.processes.pool import LARGEST
from rollpacker.env.template import Template
from rollpacker.env.template_check import check
from rollpacker.errors import one_line, told
from rollpacker.processes.children import allow_files, die_with, keep_to_itself, take_no_notice
from rollpacker.processes.frames import HEADER, check_values, frame

_THREADS = 10_000
"""The most threads for plain functions, one for each episode. One that hangs keeps its thread, and
an episode must not be charged for waiting for one."""
_FILES = 4096  # for programs that are agents: two files each, and a connection

_decode = msgspec.msgpack.Decoder(Command).decode
_encode = msgspec.msgpack.Encoder().encode


def main(descriptor: int, parent: int) -> None:
    """Serve the driver at the other end of the socket until it closes."""
    die_with(parent)
    take_no_notice()
    allow_files(_FILES)
    gone = contextlib.suppress(BrokenPipeError, ConnectionResetError, asyncio.IncompleteReadError)
    with gone, socket.socket(fileno=descriptor) as sock:
        asyncio.run(_serve(sock))


async def _serve(sock: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=sock)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    config, tokenizer, kwargs = pickle.loads(await _next(reader))
    if config.kind == "agent":
        keep_to_itself()
    try:
        factory, template, ready = _prepare(config, tokenizer, kwargs)
        await factory.open()
    except BaseException as error:  # the user's module may even exit
        text = str(error) if isinstance(error, ValueError) else told(error)
        writer.write(frame(_encode(Fatal(error=text))))
        await writer.drain()
        return
    writer.write(frame(_encode(ready)))
    host = EpisodeHost(config, factory, template, writer)
    try:
        while True:
            host.take(_decode(await _next(reader)))
            await writer.drain()
    finally:
        await factory.close()


def _prepare(
    config: EnvironmentConfig, tokenizer: bytes, kwargs: dict[str, Any]
) -> tuple[Factory, Template, EnvironmentReady]:
    factory = load(config)
    template = Template(pickle.loads(tokenizer), kwargs, call_format=config.call_format)
    warnings = check(template, list(factory.tools))
    return factory, template, _ready(factory, warnings)


def _ready(factory: Factory, warnings: list[str]) -> EnvironmentReady:
    return EnvironmentReady(
        warnings=[whole(line) for line in warnings], tools=[dict(t) for t in factory.tools]
    )


async def _next(reader: asyncio.StreamReader) -> bytes:
    size = HEADER.unpack(await reader.readexactly(HEADER.size))[0]
    return await reader.readexactly(size)


class EpisodeHost:
    """The episodes of a process."""

    def __init__(
        self,
        config: EnvironmentConfig,
        factory: Factory,
        template: Template,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._config = config
        self._factory = factory
        self._template = template
        self._writer = writer
        self._episodes: dict[int, Episode] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def take(self, command: Command) -> None:
        """Start the work of a command. Never waits."""
        match command:
            case Begin():
                episode = Episode(self._config, self._factory, self._template, command)
                self._episodes[command.episode] = episode
                self._start(command.episode, episode.begin)
            case ModelReplied():
                episode = self._episodes.get(command.episode)
                if episode is not None:
                    self._start(command.episode, partial(episode.step, command))
            case Close():
                self._drop(command.episode)

    def _start(self, number: int, work: Callable[[], Awaitable[EnvironmentAnswer]]) -> None:
        task = asyncio.create_task(self._answer(number, work))
        self._tasks[number] = task

    async def _answer(self, number: int, work: Callable[[], Awaitable[EnvironmentAnswer]]) -> None:
        answer, data = _encoded(await work())
        self._writer.write(frame(data))
        self._tell()
        if answer.over or answer.error:
            self._tasks.pop(number, None)
            self._drop(number)  # closed by now, unless its answer cannot be passed on

    def _tell(self) -> None:
        faults = self._factory.faults
        if faults.broken is not None:
            self._writer.write(frame(_encode(Fatal(error=whole(faults.broken)))))
        elif said := faults.said():
            self._writer.write(frame(_encode(_ready(self._factory, said))))

    def _drop(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()
        if episode is not None:
            closing = asyncio.create_task(episode.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)


def _encoded(answer: EnvironmentAnswer) -> tuple[EnvironmentAnswer, bytes]:
    # An answer that is too large or cannot be encoded is replaced by its reason.
    try:
        data = _encode(answer)
        check_values(data)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return _without(answer, f"its result cannot be passed on: {one_line(error)}")
    if len(data) <= LARGEST:
        return answer, data
    size = f"its conversation has {len(data) >> 20} MiB, more than {LARGEST >> 20}"
    return _without(answer, size)


def _without(answer: EnvironmentAnswer, why: str) -> tuple[EnvironmentAnswer, bytes]:
    failed = EnvironmentAnswer(episode=answer.episode, error=whole(answer.error or why))
    return failed, _encode(failed)
