"""A process of environments as the driver sees it: started, and given episodes."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollpacker.config import EnvironmentConfig
from rollpacker.env.messages import Command, Report
from rollpacker.processes.fork_server import fork_child
from rollpacker.processes.frames import Channel, check_values, frame
from rollpacker.processes.supervised import SupervisedProcess

_PRELOADED = (
    "rollpacker.env.processes.worker",
    "tokenizers",
    "transformers.convert_slow_tokenizer",
    "transformers.tokenization_utils_tokenizers",
)
"""What each process would import for itself: with the tokenizer's module most of its start."""
LARGEST = 64 << 20
"""Bytes of an answer that are read: a whole conversation."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


@dataclass(slots=True, eq=False)
class EnvironmentProcess(SupervisedProcess):
    """One process and the episodes that it holds.

    Args:
        episodes: that it holds, with the time at which each began what it is at; None: it waits
            for the model.
        leaving: it takes no more episodes, since something in it hangs.
        alone: it is for one episode, which may have brought its process down before.
        abandoned: an episode was given up while it acted, and what it is at is not known.
    """

    episodes: dict[int, float | None] = field(default_factory=dict[int, "float | None"])
    leaving: bool = False
    alone: bool = False
    abandoned: bool = False

    @property
    def busy(self) -> bool:
        """Whether it holds episodes."""
        return bool(self.episodes)


def encode(command: Command) -> bytes:
    """A command as a frame."""
    return frame(_encode(command))


def read(data: bytes) -> Report:
    """What a process says. Raises ``ValueError`` where that is nothing that it may say."""
    check_values(data)
    return _decode(data)


def start(
    config: EnvironmentConfig, tokenizer: bytes, template: dict[str, Any]
) -> EnvironmentProcess:
    """Start a process that loads the environment and then takes episodes.

    ``tokenizer`` is pickled; ``template`` has the chat template's own arguments.
    """
    popen, ours = fork_child("rollpacker.env.processes.worker", _PRELOADED)
    channel = Channel(ours, LARGEST)
    channel.send(frame(pickle.dumps((config, tokenizer, template))))
    return EnvironmentProcess(popen, channel, time.monotonic())
