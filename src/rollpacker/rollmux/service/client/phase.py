"""Phases of a job of one's own, as a context manager and as a decorator.

mux = Phases(MuxClient(url, token_file), "my-job")

@mux.phase("rollout")
def rollout(): ...

with mux.phase("train"):
    ...
    mux.check()  # a safe point
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rollpacker.core.types import Phase
from rollpacker.rollmux.model.jobs import JobSpec
from rollpacker.rollmux.service.client.client import (
    LeaseLostError,
    MoveOrder,
    MuxClient,
    PhasePermit,
)
from rollpacker.rollmux.service.client.link import MuxError, new_key
from rollpacker.rollmux.service.client.phase_lease import HeldLease, acquire


class PhaseState(Protocol):
    """What a phase needs on its devices; ``train.state.warm_state.WarmState`` is one."""

    def load(self) -> None:
        """Host memory to device."""
        ...

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
        """The job is over."""
        if self._client is not None:
            self._client.end(self._job)
