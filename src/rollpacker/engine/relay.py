"""An engine over several processes: its lead tells the other members each call before it makes it.

Members are given the same calls in the same order, so engines that schedule alike stay in step.
A plain step is one byte. A member waits for its lead's next call and uses no CPU meanwhile.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollpacker.core.types import AttemptId
from rollpacker.engine.base import (
    Engine,
    EngineInfo,
    EngineStats,
    Output,
    Request,
    Span,
    Speculation,
)

if TYPE_CHECKING:
    import torch

_STEP = b"s"
_ANSWERED = ("info", "load_weights", "sleep", "wake")
"""Calls that are over only when all members have made them: what they read or leave (weights in
shared memory, a device) is somebody else's afterwards."""
_PATIENCE_S = 60.0
_RANK = 4
"""Bytes in which a member says who it is."""
_LONGEST_PATH = 100
"""Bytes; a socket's address has no more room."""


class Lead:
    """The engine protocol over this process's part of an engine and those of its ``members``: a
    connection to each other process, by rank (``meet``).

    A member that has ended shows as ``ConnectionError`` at the next call; one that ends within a
    step can leave the others waiting for it, for as long as their collectives do.
    """

    def __init__(self, engine: Engine, members: Sequence[Connection]) -> None:
        self._engine = engine
        self._members = members

    def info(self) -> EngineInfo:
        return self._answered("info")

    def submit(self, requests: Sequence[Request]) -> None:
        self._tell("submit", requests)
        self._engine.submit(requests)

    def speculate(self, how: Speculation) -> None:
        self._tell("speculate", how)
        self._engine.speculate(how)

    def step(self) -> list[Output]:
        """One step of all members; when nothing is held they are not even told."""
        if not self._engine.busy():
            return []
        self._send(_STEP)
        return self._engine.step()

    def abort(self, attempts: Collection[AttemptId]) -> list[Output]:
        self._tell("abort", list(attempts))
        return self._engine.abort(attempts)

    def load_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | None, version: int
    ) -> None:
        """Take new weights, an iterable that says where they lie and can be pickled; returns when
        all members have them. Raises ``RuntimeError`` when attempts are held or a member alone
        failed."""
        self._answered("load_weights", weights, version)

    def sleep(self) -> None:
        self._answered("sleep")

    def wake(self) -> None:
        self._answered("wake")

    def busy(self) -> bool:
        """Whether anything is running or waiting; the members are not asked."""
        return self._engine.busy()

    def stats(self) -> EngineStats:
        """Counters and load; the members are not asked."""
        return self._engine.stats()

    def close(self) -> None:
        """End this process's part; the members see it, and end theirs."""
        for member in self._members:
            member.close()
        self._engine.close()

    def _answered(self, call: str, *arguments: Any) -> Any:
        """Make a call here and on the members, and wait for these."""
        self._tell(call, *arguments)
        try:
            result = getattr(self._engine, call)(*arguments)
        finally:
            problems = [self._answer(rank) for rank in range(1, 1 + len(self._members))]
        for rank, problem in enumerate(problems, 1):
            if problem is not None:
                raise RuntimeError(f"member {rank} of the engine alone failed: {problem}")
        return result

    def _tell(self, call: str, *arguments: Any) -> None:
        self._send(pickle.dumps((call, arguments)))

    def _send(self, message: bytes) -> None:
        for rank, member in enumerate(self._members, 1):
            try:
                member.send_bytes(message)
            except OSError as error:
                raise _gone(rank) from error

    def _answer(self, rank: int) -> str | None:
        try:
            return self._members[rank - 1].recv()
        except (EOFError, OSError) as error:
            raise _gone(rank) from error


def _gone(rank: int) -> ConnectionError:
    return ConnectionError(f"member {rank} of the engine has ended")


def follow(engine: Engine, lead: Connection) -> None:
    """Make each of the lead's calls on this member's engine, until the lead has ended.

    What a call refuses (``ValueError``) the lead's own call refuses as well and reports. A failure
    (``RuntimeError``) of a call that the lead waits for is its answer. Any other ends the member.
    """
    with suppress(EOFError, ConnectionError):
        while True:
            message = lead.recv_bytes()
            if message == _STEP:
                engine.step()
                continue
            call, arguments = pickle.loads(message)
            problem = None
            try:
                getattr(engine, call)(*arguments)
            except ValueError as error:
                problem = str(error)
            except RuntimeError as error:
                if call not in _ANSWERED:
                    raise
                problem = str(error)
            if call in _ANSWERED:
                lead.send(problem)


def meet(span: Span) -> list[Connection]:
    """The lead's connections to its members, by rank, on a socket beside the meeting file.

    Raises ``TimeoutError`` when one has not come within a minute, ``ValueError`` on a path that
    is too long for a socket.
    """
    path = _socket_path(span)
    members: dict[int, Connection] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        try:
            listener.listen(span.size)
            listener.settimeout(_PATIENCE_S)
            while len(members) < span.size - 1:
                accepted, _ = listener.accept()
                if (rank := _rank(accepted, span)) is None:
                    accepted.close()
                    continue
                members[rank] = Connection(accepted.detach())
        except TimeoutError:
            absent = sorted(set(range(1, span.size)) - members.keys())
            raise TimeoutError(
                f"members {absent} of the engine did not come to {path} in {_PATIENCE_S:.0f} s"
            ) from None
        finally:
            path.unlink(missing_ok=True)
    return [members[rank] for rank in range(1, span.size)]


def _rank(end: socket.socket, span: Span) -> int | None:
    """Of the member that has come; None for anybody else: members are of this user, and nothing is
    unpickled before they are known."""
    end.settimeout(_PATIENCE_S)
    pid_uid_gid = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", pid_uid_gid)[1]
    try:
        rank = int.from_bytes(end.recv(_RANK, socket.MSG_WAITALL), "little")
    except OSError:
        return None
    end.setblocking(True)
    return rank if uid == os.geteuid() and 0 < rank < span.size else None


def join(span: Span) -> Connection:
    """A member's connection to its lead. Raises ``TimeoutError`` when that does not listen."""
    path = _socket_path(span)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        member = socket.socket(socket.AF_UNIX)
        try:
            member.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            member.close()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the engine's lead does not listen at {path} after {_PATIENCE_S:.0f} s"
                ) from None
            time.sleep(0.01)
            continue
        member.sendall(span.rank.to_bytes(_RANK, "little"))
        return Connection(member.detach())


def _socket_path(span: Span) -> Path:
    path = Path(f"{span.meeting}.relay")
    if len(bytes(path)) > _LONGEST_PATH:
        raise ValueError(f"{path} is too long for a socket: at most {_LONGEST_PATH} bytes")
    return path
