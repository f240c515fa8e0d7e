"""The phases of a ``rollpacker train`` job, whose worker processes move to the permit's nodes.

The workers stay alive between phases, so a switch costs a request and an affinity call. After a
lost lease the workers are frozen until the job gets the phase again. Nothing is computed twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from rollpacker.config import RunConfig
from rollpacker.core.types import Phase
from rollpacker.rollmux.service.client.client import (
    LeaseLostError,
    MoveOrder,
    MuxClient,
    MuxError,
    PhasePermit,
    UnreachableError,
    new_key,
)
from rollpacker.rollmux.service.client.phase import HeldLease, StateLostError, acquire
from rollpacker.rollmux.service.job.submission import attach, connect, job_id, job_spec, register
from rollpacker.runtime.cluster.cluster import Launcher
from rollpacker.runtime.ipc.rendezvous import start_agent
from rollpacker.runtime.ipc.watchdog_client import Watchdog
from rollpacker.runtime.step.phase_nodes import DisplacedError, Tenant, WaitStoppedError


class Residence:
    """Tracks which states of a job are on its devices (at first all), and moves them.

    ``promised_gb`` is the host memory that the job may keep on a node of each pool.
    """

    def __init__(self, tenant: Tenant, promised_gb: Mapping[Phase, float]) -> None:
        self._tenant = tenant
        self._promised_gb = promised_gb
        self._there: set[Phase] = {"rollout", "train"}

    async def begin(self, phase: Phase) -> float:
        """Load the phase's state only. Returns the seconds that it took. Raises like ``leave``."""
        if self._there == {phase}:
            return 0.0
        begun = time.monotonic()
        for other in sorted(self._there - {phase}):
            await self._offload(other)
        if phase not in self._there:
            await self._tenant.onload(phase)
            self._there.add(phase)
        return time.monotonic() - begun

    async def leave(self) -> float:
        """Leave all devices. Returns the seconds that it took.

        Raises ``ValueError`` if more state stays in host memory than the job has reserved.
        """
        begun = time.monotonic()
        for phase in sorted(self._there):
            await self._offload(phase)
        return time.monotonic() - begun

    async def _offload(self, phase: Phase) -> None:
        kept_gb = await self._tenant.offload(phase) / 2**30
        self._there.discard(phase)
        if kept_gb > self._promised_gb[phase]:
            raise ValueError(
                f"mux.{phase}_memory_gb={self._promised_gb[phase]:g} is too low: the job keeps "
                f"{kept_gb:.3g} GB of states on a {phase} node between two phases"
            )


_AGAIN_S = 5.0  # seconds between repeats, since a restarted daemon does not know the gate
_SOCKET_S = 10.0
_LEAVING_S = 5.0


class MuxLauncher:
    """Publishes the address of the driver's gate to the job's other nodes, through the daemon.

    It starts the agent of the driver's own node. RollMux's agents have started the others
    (``Program.members``). If one is lost, the attempt ends.
    """

    def __init__(self, config: RunConfig, client: MuxClient | None = None) -> None:
        self._url = config.mux.url
        self._client = client or connect(config.mux)
        self._job = job_id(config)
        self._attempt = 0
        self._own: subprocess.Popen[bytes] | None = None
        self._telling: asyncio.Task[None] | None = None

    @property
    def host(self) -> str:
        url = urlsplit(self._url)
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            with socket.create_connection((url.hostname or "", port), _SOCKET_S) as way:
                return way.getsockname()[0]
        except OSError as error:
            raise ValueError(f"mux.url={self._url}: {error}") from error

    async def launch(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        """Admit an agent from each of the job's nodes, by these names.

        Raises ``ValueError`` if the job has another number of nodes.
        """
        program = (await asyncio.to_thread(self._client.job, self._job))["program"]
        assert program is not None
        attempt = program["attempts"][-1]
        nodes, self._attempt = 1 + len(attempt["members"]), attempt["number"]
        if nodes != len(names):
            raise ValueError(
                f"devices.nodes={len(names)}, but job {self._job} has {nodes}: submit it again"
            )
        self._own = start_agent(*address, key.hex(), names[0])
        await asyncio.to_thread(self._tell, address, key, names)
        self._telling = asyncio.create_task(self._tell_again(address, key, names))

    def _tell(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        self._client.open_gate(self._job, self._attempt, *address, key, names)

    async def _tell_again(self, address: tuple[str, int], key: bytes, names: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            with suppress(MuxError, UnreachableError):
                await asyncio.to_thread(self._tell, address, key, names)

    async def replace(self, address: tuple[str, int], key: bytes, number: int, name: str) -> None:
        """Not supported, since an attempt has all of its nodes or ends. Raises ``ValueError``."""
        del address, key, name
        raise ValueError(f"node {number} is gone: the job's program starts again as a whole")

    def close(self) -> None:
        """End the agent of the driver's own node. The others end with the attempt."""
        if self._telling is not None:
            self._telling.cancel()
        if self._own is not None:
            assert self._own.stdin is not None
            self._own.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._own.wait(_LEAVING_S)
            self._own.kill()
            self._own.wait()
            self._own = None


_PATIENCE_S = 5.0
_WAIT_S = 2.0
"""Seconds of one request. Ctrl-C is checked between two of them."""


def place(pids: Sequence[int], permit: PhasePermit, cores: Mapping[str, Sequence[int]]) -> None:
    """Pin all threads of processes to the cores of a permit's nodes, if ``cores`` has any.

    Raises ``ValueError`` if ``mux.cores`` has neither a node nor its pool.
    """
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(f"mux.cores needs Linux, this is {sys.platform}: leave it empty")
    missing = [node for node in permit.nodes if node not in cores and permit.phase not in cores]
    if missing:
        raise ValueError(
            f"mux.cores has neither node {missing[0]!r} nor '{permit.phase}': add its CPU cores"
        )
    target = sorted({c for node in permit.nodes for c in cores.get(node) or cores[permit.phase]})
    for pid in pids:
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except FileNotFoundError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(int(thread), target)
            except ProcessLookupError:
                continue
            except OSError as error:
                raise ValueError(f"mux.cores: cores {target} cannot be used: {error}") from error


class JobPhases:
    """Implements ``runtime.phases.Phases`` with a daemon's permits. ``say`` prints a line."""

    def __init__(
        self,
        config: RunConfig,
        client: MuxClient | None = None,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        mux = config.mux
        self._cores: Mapping[str, Sequence[int]] = mux.cores
        self._client = client or connect(mux)
        self._managed = mux.managed
        own = mux.managed and config.cluster.address == "mux"
        self.launcher: Launcher | None = MuxLauncher(config, self._client) if own else None
        self._spec = job_spec(config, job_id(config))
        self._job = self._spec.id
        self._tenant: Tenant | None = None
        self._residence: Residence | None = None
        self._fail: Callable[[Exception], None] = lambda _error: None
        self._release_tail: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._regaining = threading.Lock()
        self._lease: HeldLease | None = None
        self._say = say
        self._away = False
        self._registered = False
        self._stopped = False
        self._interrupts = 0
        self._broken: Exception | None = None
        self._reset_clock()
        names = ("phases", "waited_s", "switch_s", "lost", "redone", "tails")
        self.stats: dict[str, float] = dict.fromkeys(names, 0.0)
        self._guard: Watchdog | None = None
        self._fence: Callable[[float | None], None] = lambda _stop_at: None

    async def open(
        self,
        tenant: Tenant,
        fail: Callable[[Exception], None],
        release_tail: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._tenant = tenant
        promised: dict[Phase, float] = {
            "rollout": self._spec.rollout_memory_gb,
            "train": self._spec.train_memory_gb,
        }
        self._residence = Residence(tenant, promised)
        self._fail = lambda error: loop.call_soon_threadsafe(fail, error) and None
        self._release_tail = lambda: loop.call_soon_threadsafe(release_tail) and None
        self._stopped, self._broken = False, None
        self._fence = lambda stop_at: loop.call_soon_threadsafe(tenant.fence, stop_at) and None
        self._guard = Watchdog()
        join = attach if self._managed else register
        self._job = await asyncio.to_thread(
            join, self._client, self._spec, lambda: self._stopped, self._tell_away
        )
        self._registered = True

    async def begin(self, phase: Phase) -> None:
        """Wait for the nodes and pin the workers there.

        A job killed in training has lost its rollouts. It repeats them under its training permit.
        """
        if self._lease is None or self._lease.permit.phase != phase:
            if self._lease is not None and phase == "train":
                await self.end()
            if self._lease is None:
                await asyncio.to_thread(self._begin, phase)
        if self._broken is not None:
            raise self._broken
        if self._residence is not None:
            self.stats["switch_s"] += await self._residence.begin(phase)

    async def offer_tail(self) -> None:
        """Offer the nodes of the running rollout to other jobs, except for the tail's workers."""
        lease = self._lease
        if lease is not None and lease.permit.phase == "rollout":
            await asyncio.to_thread(lease.offer_tail, self._job)

    async def end(self) -> None:
        if self._residence is not None:
            self.stats["switch_s"] += await self._residence.leave()
        await asyncio.to_thread(self._end)

    def interrupt(self) -> None:
        """The user wants to stop: the first time wait for no more rollouts, the second time for
        nothing."""
        self._interrupts += 1

    async def close(self, *, displaced: bool = False) -> None:
        """Give up a running phase. End the job unless it is ``displaced`` or its agent ends it."""
        self._stopped = True
        ending = self._registered and not displaced and not self._managed
        await asyncio.to_thread(self._close, ending)

    def _begin(self, phase: Phase) -> None:
        asked = time.monotonic()
        permit = self._acquire(phase, 1 if phase == "rollout" else 2)
        granted = time.monotonic()
        self._reset_clock()
        self._hold(permit)
        self.stats["phases"] += 1
        self.stats["waited_s"] += granted - asked
        self.stats["switch_s"] += time.monotonic() - granted

    def _pids(self) -> Sequence[int]:
        return () if self._tenant is None else self._tenant.pids

    def _is_stopped(self, interrupts: int = 2) -> bool:
        return self._stopped or self._interrupts >= interrupts

    def _acquire(self, phase: Phase, interrupts: int = 2) -> PhasePermit:
        since, told = time.monotonic(), False

        def stopped() -> bool:
            nonlocal told
            if not (told or self._away) and time.monotonic() - since > _PATIENCE_S:
                told = True
                self._say(f"waiting for {phase} nodes, which other jobs use")
            return self._is_stopped(interrupts)

        while True:
            try:
                permit = acquire(
                    self._client, self._job, phase, self._move, stopped, _WAIT_S, self._tell_away
                )
                self._away = False
                return permit
            except LeaseLostError as error:
                raise WaitStoppedError(str(error)) from error
            except StateLostError as error:
                raise DisplacedError(str(error)) from error
            except MuxError as error:
                ahead = phase == "rollout" and error.code == "order"
                if not ahead or error.answer.get("next") != "train":
                    raise
                phase = "train"
                self.stats["redone"] += 1

    def _tell_away(self, error: UnreachableError) -> None:
        if not self._away:
            self._away = True
            self._say(
                "waiting for the RollMux daemon (mux.url). Start one with 'rollpacker mux serve', "
                f"or stop with Ctrl-C: {error}"
            )

    def _move(self, move: MoveOrder) -> None:
        """The state is in the workers, which the next permit pins to the new nodes."""

    def _hold(self, permit: PhasePermit) -> None:
        with self._lock:
            if self._stopped:
                self._client.abandon(permit)
                return
            try:
                place(self._pids(), permit, self._cores)
            except Exception:
                self._client.abandon(permit)
                raise
            self._tell_guard(permit.stop_at)
            self._running_since = time.monotonic()
            self._lease = HeldLease(
                self._client,
                permit,
                on_extended=self._tell_guard,
                on_lost=self._regain,
                on_tail=self._on_tail,
            )

    def _on_tail(self) -> None:
        self.stats["tails"] += 1
        self._release_tail()

    def _regain(self) -> None:
        """The lease is lost during a phase: freeze the workers, wait for a permit, continue."""
        with self._regaining:
            with self._lock:
                lease = self._lease
                if lease is None or self._stopped or self._broken or not lease.lost:
                    return
                lease.give_up("its lease ran out")
                self._freeze(lease)
                self.stats["lost"] += 1
            try:
                permit = self._acquire(lease.permit.phase)
                if permit.phase != lease.permit.phase:
                    raise MuxError(409, {"error": f"job {self._job}: its phase is over already"})
                self._hold(permit)
            except (DisplacedError, WaitStoppedError, MuxError, ValueError) as error:
                self._broken = error
                if not self._stopped:
                    self._fail(error)

    def _end(self) -> None:
        """Finish the phase, under a new permit if the lease was lost."""
        while True:
            with self._lock:
                lease = self._lease
                if self._broken is not None:
                    raise self._broken
                if lease is None:
                    return
                try:
                    lease.check()
                    self._finish(lease.permit)
                except LeaseLostError as error:
                    lease.give_up(str(error))
                else:
                    self._lease = None
                    break
            self._regain()
        lease.close()
        self._tell_guard(None)

    def _finish(self, permit: PhasePermit) -> None:
        finish = partial(self._client.finish, permit, self._seconds(), new_key())
        while True:
            try:
                finish()
                return
            except UnreachableError as error:
                if self._is_stopped():
                    raise WaitStoppedError(f"{error}: the phase was not finished") from error

    def _close(self, ending: bool) -> None:
        with self._lock:
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
            self._client.abandon(lease.permit)
        self._tell_guard(None)
        if ending:
            with contextlib.suppress(MuxError, UnreachableError):
                self._client.end(self._job)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None

    def _freeze(self, lease: HeldLease) -> None:
        # If this process was stopped too, the guard froze the workers at the end of the lease.
        until = min(time.monotonic(), lease.stop_at)
        self._active_s += max(0.0, until - self._running_since)
        self._running_since = math.nan
        self._tell_guard(0.0)

    def _reset_clock(self) -> None:
        self._active_s = 0.0
        self._running_since = math.nan

    def _seconds(self) -> float:
        return max(1e-6, self._active_s + time.monotonic() - self._running_since)

    def _tell_guard(self, stop_at: float | None) -> None:
        if self._guard is None:
            return
        self._fence(stop_at)
        try:
            self._guard.tell(self._pids(), stop_at)
        except BrokenPipeError:
            self._fail(RuntimeError("the watchdog of the job's lease has died"))
