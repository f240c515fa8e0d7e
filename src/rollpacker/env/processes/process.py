"""A process of environments as the driver sees it: started, given episodes, killed."""

from __future__ import annotations

import pickle
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollpacker.config import EnvironmentConfig
from rollpacker.env.messages import Command, Report
from rollpacker.processes.children import kill_child, start_child
from rollpacker.processes.frames import Channel, check_values, frame

LARGEST = 64 << 20
"""Bytes of an answer that are read: a whole conversation."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


@dataclass(slots=True, eq=False)
class Member:
    """One process and the episodes that it holds.

    Args:
        popen: the process.
        channel: its socket.
        started: when it was started, monotonic seconds.
        episodes: that it holds, with the time at which each began what it is at; None: it waits
            for the model.
        ready: whether its environment is loaded.
        leaving: it takes no more episodes, since something in it hangs.
        alone: it is for one episode, which may have brought its process down before.
        abandoned: an episode was given up while it acted, and what it is at is not known.
    """

    popen: subprocess.Popen[bytes]
    channel: Channel
    started: float
    episodes: dict[int, float | None] = field(default_factory=dict[int, "float | None"])
    ready: bool = False
    leaving: bool = False
    alone: bool = False
    abandoned: bool = False

    def tell(self, command: Command) -> None:
        """Write a command; with ``channel.unsent``, ``flush`` must follow."""
        self.channel.send(frame(_encode(command)))

    def hear(self) -> tuple[list[Report], str | None]:
        """What it has said, and why it must go if it must. Never raises."""
        # A child of its own may hold the other end, so the socket alone does not tell.
        dead = self.popen.poll() is not None
        reports: list[Report] = []
        gone = self.channel.hear(lambda data: reports.append(_read(data)))
        return reports, "" if gone is None and dead else gone

    def kill(self) -> str:
        """End it with what it started, and say how it ended."""
        self.channel.close()
        return kill_child(self.popen)


def _read(data: bytes) -> Report:
    check_values(data)
    return _decode(data)


def start(config: EnvironmentConfig, tokenizer: bytes, template: dict[str, Any]) -> Member:
    """Start a process that loads the environment and then takes episodes.

    ``tokenizer`` is pickled; ``template`` has the chat template's own arguments.
    """
    popen, ours = start_child("rollpacker.env.processes.worker")
    channel = Channel(ours, LARGEST)
    channel.send(frame(pickle.dumps((config, tokenizer, template))))
    return Member(popen, channel, time.monotonic())
