"""An engine over several processes: its lead sends each call to the other members, then makes it.
All members get the same calls in the same order, so their schedules stay equal. A plain step is one
byte. A waiting member uses no CPU."""

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
"""Calls that end only when all members have made them, as the memory that they read or free (shared
weights, a device) is then reused."""
_PATIENCE_S = 60.0
_RANK = 4  # bytes in which a member sends its rank
_LONGEST_PATH = 100  # bytes that a socket's address can hold


class Lead:
    """The engine protocol over this process's part of an engine and its ``members``. ``members``
    are connections by rank (``meet``). If a member has ended, the next call raises
    ``ConnectionError``. If it ends within a step, the others may wait as long as their collectives
    do."""

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
        """Take new weights, from an iterable that can be pickled. Returns when all members have
        them. Raises ``RuntimeError`` when attempts are held or a member alone failed."""
        self._answered("load_weights", weights, version)

    def sleep(self) -> None:
        self._answered("sleep")

    def wake(self) -> None:
        self._answered("wake")

    def busy(self) -> bool:
        return self._engine.busy()

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self) -> None:
        for member in self._members:
            member.close()
        self._engine.close()

    def _answered(self, call: str, *arguments: Any) -> Any:
        self._tell(call, *arguments)
        try:
            result = getattr(self._engine, call)(*arguments)
        finally:
            problems = [self._answer(rank) for rank in range(1, 1 + len(self._members))]
        for rank, problem in enumerate(problems, 1):
            if problem is not None:
                raise RuntimeError(f"process {rank} of the engine alone failed: {problem}")
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
    return ConnectionError(f"process {rank} of the engine has ended")


def follow(engine: Engine, lead: Connection) -> None:
    """Make each of the lead's calls on this member's engine, until the lead has ended.

    The lead's own call refuses the same (``ValueError``) and reports it. If a call that the lead
    waits for fails (``RuntimeError``), the failure is the answer. Any other failure ends the
    member.
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
    """The lead's connections to its members, by rank, on a socket beside the meeting file. Raises
    ``TimeoutError`` if a member does not come within a minute, ``ValueError`` if the path is too
    long for a socket."""
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
                f"processes {absent} of the engine did not connect to {path} in {_PATIENCE_S:.0f} s"
            ) from None
        finally:
            path.unlink(missing_ok=True)
    return [members[rank] for rank in range(1, span.size)]


def _rank(end: socket.socket, span: Span) -> int | None:
    end.settimeout(_PATIENCE_S)
    # Nothing is unpickled from a process of another user.
    pid_uid_gid = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid = struct.unpack("3i", pid_uid_gid)[1]
    try:
        rank = int.from_bytes(end.recv(_RANK, socket.MSG_WAITALL), "little")
    except OSError:
        return None
    end.setblocking(True)
    return rank if uid == os.geteuid() and 0 < rank < span.size else None


def join(span: Span) -> Connection:
    """A member's connection to its lead. Raises ``TimeoutError`` if the lead does not listen."""
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
                    f"process 0 of the engine does not listen at {path} after {_PATIENCE_S:.0f} s"
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
