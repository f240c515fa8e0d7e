"""Phases of a job of one's own, as a context manager and as a decorator.

mux = Phases(MuxClient(url, token_file), "my-job")

@mux.phase("rollout")
def rollout(): ...

with mux.phase("train"):
    ...
    mux.check()  # a safe point
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from rollpacker.core.types import Phase
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.client.client import (
    LeaseLostError,
    MoveOrder,
    MuxClient,
    MuxError,
    PhasePermit,
    UnreachableError,
    new_key,
)

_RETRY_S = 0.2
T = TypeVar("T")


class StateLostError(RuntimeError):
    """The job's nodes failed: load the last checkpoint; the iteration begins with a rollout."""


def acquire(
    client: MuxClient,
    job: str,
    phase: Phase,
    on_move: Callable[[MoveOrder], None],
    stopped: Callable[[], bool] = lambda: False,
    wait_s: float = 20.0,
    away: Callable[[UnreachableError], None] = lambda _error: None,
) -> PhasePermit:
    """Wait for a phase's nodes, moving the job's state first where that is asked for.

    While the daemon is away the wait goes on: nothing may run without it. Raises ``MuxError`` for
    what waiting cannot mend (see its ``code``), ``StateLostError`` when the nodes have failed and
    ``LeaseLostError`` when ``stopped``, which is asked every ``wait_s`` at least, says so.
    """
    key = new_key()
    while True:
        try:
            got = patiently(partial(client.permit, job, phase, key, wait_s=wait_s), stopped, away)
        except MuxError as error:
            key = _next_key(error, key)
            continue
        if isinstance(got, PhasePermit):
            return got
        if isinstance(got, MoveOrder):
            on_move(got)
            patiently(partial(client.moved, job, got, new_key()), stopped, away)
            if got.reason == "failure":
                raise StateLostError(f"job {job}: a node failed; going on from a checkpoint")


def patiently(
    call: Callable[[], T],
    stopped: Callable[[], bool],
    away: Callable[[UnreachableError], None] = lambda _error: None,
) -> T:
    """Repeat a request until it is answered; ``away`` is told of every time that it was not.

    Raises ``LeaseLostError`` when ``stopped``.
    """
    while not stopped():
        try:
            return call()
        except UnreachableError as error:
            away(error)
    raise LeaseLostError("stopped while it waited for the daemon")


def _next_key(error: MuxError, key: str) -> str:
    """The key to ask again with; raises the error when asking again cannot help."""
    if error.code == "held":
        # A process of this job that is gone still holds a lease; it runs out.
        time.sleep(min(1.0, max(0.05, float(error.answer.get("ttl_s", _RETRY_S)))))
        return key
    if error.code == "over":
        return new_key()
    raise error


class HeldLease:
    """A permit whose lease a thread extends until ``close``.

    ``check`` is for the owner's safe points: it looks at the clock itself, so a process that was
    stopped for longer than the lease finds out before it does anything else.

    Of a lease that was given up, or is closed, nobody is told anything any more: an answer that
    comes late would start workers which have been stopped since.
    """

    def __init__(
        self,
        client: MuxClient,
        permit: PhasePermit,
        *,
        on_extended: Callable[[float], None] = lambda _stop_at: None,
        on_lost: Callable[[], None] = lambda: None,
        on_tail: Callable[[], None] = lambda: None,
    ) -> None:
        self._client = client
        self.permit = permit
        self.stop_at = permit.stop_at
        """Monotonic seconds after which nothing may run."""
        self._on_extended = on_extended
        self._on_lost = on_lost
        self._on_tail = on_tail
        self.tail_released = False
        """Whether another job has the nodes: the rest of a rollout has to leave most workers."""
        self._problem: str | None = None
        self._telling = threading.Lock()
        """Held while the owner is told, and while it is decided that it is not any more."""
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._keep, name=f"lease-{permit.token}", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether the nodes may be another job's."""
        return self._problem is not None or time.monotonic() >= self.stop_at

    def check(self) -> None:
        """Raises ``LeaseLostError`` when the phase has to stop."""
        if self.lost:
            reason = self._problem or "its lease ran out"
            raise LeaseLostError(f"permit {self.permit.token} ({self.permit.phase}): {reason}")

    def give_up(self, reason: str) -> None:
        """It is lost, as the daemon or the clock has said: no answer brings it back."""
        with self._telling:
            self._problem = self._problem or reason

    def offer_tail(self, job: str) -> None:
        """Most responses of a rollout are there; nothing happens where the daemon is away."""
        try:
            released = self._client.tail(job, self.permit)
        except (LeaseLostError, UnreachableError):
            return
        self._told(None, released)

    def _told(self, stop_at: float | None, tail_released: bool) -> None:
        with self._telling:
            if self._problem is not None or self._closing.is_set():
                return
            if stop_at is not None:
                self.stop_at = stop_at
                self._on_extended(stop_at)
            if tail_released and not self.tail_released:
                self.tail_released = True
                self._on_tail()

    def close(self) -> None:
        """Stop extending; may be called from ``on_lost``, and not from what else it tells."""
        with self._telling:
            self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _keep(self) -> None:
        pause = self.permit.lease_s / 3
        while not self._closing.wait(pause):
            pause = self.permit.lease_s / 3
            try:
                self._extend()
            except (LeaseLostError, UnreachableError) as error:
                self.give_up(str(error))
            except MuxError:
                pause = _RETRY_S
            if self.lost:
                if not self._closing.is_set():
                    self._on_lost()
                return

    def _extend(self) -> None:
        if self.lost:
            raise LeaseLostError("its lease ran out")
        now = replace(self.permit, stop_at=self.stop_at)
        self._told(*self._client.heartbeat(now))


class PhaseState(Protocol):
    """What a phase needs on its devices; ``train.state.warm_state.WarmState`` is one."""

    def load(self) -> None: ...

    def offload(self) -> None:
        """Device to host memory, the device's memory given back."""
        ...


def stay(_move: MoveOrder) -> None:
    """What a job does on a move when its state is reachable from any node."""


class Phases:
    """A job's phases; without a client, as without a daemon, they just run.

    Args:
        client: of the daemon; None to run alone.
        job: its id, submitted before.
        states: what each phase loads before it begins and offloads when it is over.
        on_move: loads the job's state on other nodes, from the last checkpoint when the reason is
            ``failure``.
    """

    def __init__(
        self,
        client: MuxClient | None,
        job: str,
        *,
        states: Mapping[Phase, PhaseState] | None = None,
        on_move: Callable[[MoveOrder], None] = stay,
    ) -> None:
        self._client = client
        self._job = job
        self._states = dict(states or {})
        self._on_move = on_move
        self._lease: HeldLease | None = None

    def submit(self, spec: JobSpec) -> None:
        """Register the job; nothing to do when the daemon knows it already."""
        if self._client is None:
            return
        try:
            self._client.submit(spec)
        except MuxError as error:
            if error.code != "exists":
                raise
            self._client.job(spec.id)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[PhasePermit | None]:
        """Run a phase on nodes of its own; yields the permit, None without a daemon.

        An exception gives the nodes back with the phase unfinished: it has to be asked for again.
        Raises ``LeaseLostError`` at the end when the lease was lost on the way, ``MuxError`` when
        it is not this phase's turn, ``StateLostError`` when the nodes have failed.
        """
        if self._client is None:
            yield None
            return
        assert self._lease is None, "a job has one phase at a time"
        client, state = self._client, self._states.get(name)
        permit = acquire(client, self._job, name, self._on_move)
        lease = self._lease = HeldLease(client, permit)
        there = state is not None
        try:
            if state is not None:
                state.load()
            lease.check()
            begun = time.monotonic()
            yield permit
            seconds = time.monotonic() - begun
            lease.check()
            if state is not None:
                there = False
                state.offload()
            client.finish(permit, seconds, new_key())
        except BaseException as error:
            # Off the devices, whatever state the phase was left in; once, as buffers move with it.
            if state is not None and there:
                state.offload()
            if not isinstance(error, LeaseLostError):
                client.abandon(permit)
            raise
        finally:
            lease.close()
            self._lease = None

    def check(self) -> None:
        """A safe point: raises ``LeaseLostError`` when the running phase has to stop."""
        if self._lease is not None:
            self._lease.check()

    def offer_tail(self) -> bool:
        """Most responses of the running rollout are there: others may have its nodes.

        True when another job has them: move the rest to a quarter of the workers. To be asked
        again later, as a job may come.
        """
        if self._lease is None:
            return False
        if not self._lease.tail_released:
            self._lease.offer_tail(self._job)
        return self._lease.tail_released

    def end(self) -> None:
        if self._client is not None:
            self._client.end(self._job)
