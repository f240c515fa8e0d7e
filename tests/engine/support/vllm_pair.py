"""A vLLM engine on two devices: the process of the tests leads, a child of it follows."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from itertools import count
from pathlib import Path

from rollpacker.config import ModelConfig, VllmEngineConfig
from rollpacker.engine.base import Span
from rollpacker.engine.relay import Lead, follow, join, meet

_NUMBERS = count()
"""Of meetings: what one leaves in shared memory is under its name."""


def member(folder: str, config: VllmEngineConfig, span: Span):
    from rollpacker.engine.vllm import VllmEngine

    return VllmEngine(ModelConfig(path=folder), config=config, span=span)


def serve(orders) -> None:
    """The child: a member of one engine after the other; says when it has let go of each."""
    while True:
        try:
            asked = orders.recv()
        except EOFError:
            return
        engine = member(*asked)
        follow(engine, join(asked[2]))
        engine.close()
        orders.send("left")


class Pair:
    """Engines over this process and its child, one at a time.

    ``lead`` is the engine, ``own`` this process's part of it, ``meeting`` where they met.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list = []
        self.own = self.lead = None
        self.meeting = ""
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, theirs = context.Pipe()
        self.child = context.Process(target=serve, args=(theirs,), daemon=True)
        self.child.start()
        theirs.close()

    def build(self, model_folder: Path, **config) -> Lead:
        """An engine of two; the one before is over."""
        self.part()
        name = f"meet-{os.getpid()}-{next(_NUMBERS)}"
        self.meeting = f"{self._folder.name}/{name}"
        settings = VllmEngineConfig(**config)
        spans = [Span(rank=rank, size=2, meeting=self.meeting) for rank in range(2)]
        self._orders.send((str(model_folder), settings, spans[1]))
        self.own = member(str(model_folder), settings, spans[0])
        self._connections = meet(spans[0])
        self.lead = Lead(self.own, self._connections)
        return self.lead

    def part(self) -> None:
        """The lead ends; so does what follows it."""
        if self.own is not None:
            self.own.close()
        self.own = self.lead = None
        for connection in self._connections:
            connection.close()
        if self._connections:
            assert self._orders.recv() == "left"
        self._connections = []

    def replace_child(self) -> None:
        """After it was killed."""
        self._connections = []
        self._start()

    def close(self) -> None:
        """No more engines."""
        self.part()
        self._orders.close()
        self.child.join(30)
        self._folder.cleanup()
