"""Phases of your own job, as a context manager and as a decorator.

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
    """The job's nodes failed. Load the last checkpoint. The iteration begins with a rollout."""


def acquire(
    client: MuxClient,
    job: str,
    phase: Phase,
    on_move: Callable[[MoveOrder], None],
    stopped: Callable[[], bool] = lambda: False,
    wait_s: float = 20.0,
    away: Callable[[UnreachableError], None] = lambda _error: None,
) -> PhasePermit:
    """Wait for a phase's nodes, and move the job's state first if the daemon asks for it.

    It waits while the daemon is unreachable, since nothing may run without it. Raises ``MuxError``
    if
    waiting is useless (see its ``code``), ``StateLostError`` if the nodes failed, and
    ``LeaseLostError``
    if ``stopped``, which is asked at least every ``wait_s`` seconds.
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
                raise StateLostError(f"job {job}: a node failed, so it continues from a checkpoint")


def patiently(
    call: Callable[[], T],
    stopped: Callable[[], bool],
    away: Callable[[UnreachableError], None] = lambda _error: None,
) -> T:
    """Repeat a request until it is answered. Call ``away`` after each failure.

    Raises ``LeaseLostError`` when ``stopped``.
    """
    while not stopped():
        try:
            return call()
        except UnreachableError as error:
            away(error)
    raise LeaseLostError("stopped while waiting for the daemon")


def _next_key(error: MuxError, key: str) -> str:
    """The key for the next try. Raises the error if another try is useless."""
    if error.code == "held":
        # A dead process of this job still holds a lease, which will expire.
        time.sleep(min(1.0, max(0.05, float(error.answer.get("ttl_s", _RETRY_S)))))
        return key
    if error.code == "over":
        return new_key()
    raise error


class HeldLease:
    """A permit whose lease a thread extends until ``close``.

    Call ``check`` at safe points. It reads the clock, so a process that was stopped for longer than
    the
    lease notices first. A lost or closed lease has no callbacks, since a late answer would restart
    stopped workers.
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
        self.stop_at = permit.stop_at  # monotonic seconds after which nothing may run
        self._on_extended = on_extended
        self._on_lost = on_lost
        self._on_tail = on_tail
        self.tail_released = False
        """Whether another job has the nodes, so that the rest of a rollout must leave most workers.
        """
        self._problem: str | None = None
        self._telling = threading.Lock()  # held during callbacks, and while they are switched off
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._keep, name=f"lease-{permit.token}", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether another job may have the nodes."""
        return self._problem is not None or time.monotonic() >= self.stop_at

    def check(self) -> None:
        """Raises ``LeaseLostError`` if the phase must stop."""
        if self.lost:
            reason = self._problem or "its lease ran out"
            raise LeaseLostError(f"permit {self.permit.token} ({self.permit.phase}): {reason}")

    def give_up(self, reason: str) -> None:
        """Mark the lease as lost. No later answer restores it."""
        with self._telling:
            self._problem = self._problem or reason

    def offer_tail(self, job: str) -> None:
        """Report that most responses of a rollout are done. Does nothing without the daemon."""
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
        """Stop extending. Except for ``on_lost``, no callback may call this."""
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
    """A phase's state on its devices. ``train.state.warm_state.WarmState`` is one."""

    def load(self) -> None: ...

    def offload(self) -> None:
        """Move it from device to host memory, and free the device's memory."""
        ...


def stay(_move: MoveOrder) -> None:
    """The reaction to a move of a job whose state is reachable from any node."""


class Phases:
    """A job's phases. Without a client they simply run.

    Args:
        states: state that each phase loads first and offloads at its end.
        on_move: loads the job's state on other nodes, from the last checkpoint if the reason is
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
        """Register the job, unless the daemon knows it already."""
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
        """Run a phase on its own nodes. Yields the permit, or None without a daemon.

        An exception gives the nodes back with the phase unfinished, so the job must ask for it
        again. Raises
        ``LeaseLostError`` at the end if the lease was lost, ``MuxError`` if it is not this phase's
        turn, and
        ``StateLostError`` if the nodes have failed.
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
            # Offload in any state of the phase, but only once, since buffers move with it.
            if state is not None and there:
                state.offload()
            if not isinstance(error, LeaseLostError):
                client.abandon(permit)
            raise
        finally:
            lease.close()
            self._lease = None

    def check(self) -> None:
        """A safe point: raises ``LeaseLostError`` if the running phase must stop."""
        if self._lease is not None:
            self._lease.check()

    def offer_tail(self) -> bool:
        """Report that most responses of the running rollout are done.

        True if another job has the nodes: move the rest to a quarter of the workers. Call it again
        later,
        since a job may arrive.
        """
        if self._lease is None:
            return False
        if not self._lease.tail_released:
            self._lease.offer_tail(self._job)
        return self._lease.tail_released

    def end(self) -> None:
        if self._client is not None:
            self._client.end(self._job)
