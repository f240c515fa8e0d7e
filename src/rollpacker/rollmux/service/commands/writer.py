"""The single writer: a thread that runs requests in batches and answers after their commit."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from rollpacker.rollmux.service.api.roles import Refused
from rollpacker.rollmux.service.state.transaction_log import Poisoned, TransactionLog
from rollpacker.rollmux.service.store import StoreError, UnavailableError

_log = logging.getLogger(__name__)
MAX_BATCH = 256
MAX_QUEUE = 4096
COMMIT_S = 0.1
"""Seconds until a batch is committed. Requests that have not begun by then go to the next one."""
_RETRY_S = 1.0
_LOOKS = 4
"""Least looks per lease. After half a lease without one, the daemon itself stood still."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer: a JSON object, bytes or pieces of text. A body of None is empty."""

    status: int
    body: Mapping[str, Any] | bytes | Generator[str, None, None] | None
    media: str = "application/json"


@dataclass(frozen=True, slots=True)
class NoPermitYet:
    """The request for a permit must wait."""

    job: str
    key: str


Outcome = Answer | NoPermitYet
Command = Callable[[TransactionLog], Any]  # returns an outcome, or a view of the state
Poll = Callable[[TransactionLog, str, str], Outcome]
"""Asks again for a job's request by its key. May raise ``Refused``."""
Open = Callable[[], TransactionLog]


@dataclass(slots=True)
class Stats:
    """Numbers for the metrics. ``observe`` gets the entries and seconds of every commit."""

    observe: Callable[[int, float], None] = lambda _count, _seconds: None
    failures: int = 0
    poisoned: int = 0
    recovery_s: float = 0.0


@dataclass(slots=True)
class _Call:
    command: Command
    future: asyncio.Future[Any]
    turn: tuple[bool, int]


def unavailable(error: object) -> Refused:
    """A refusal with unknown outcome. A repeat with the same key finds out."""
    text = f"{error}. The outcome is unknown: send the same request with the same key again"
    return Refused(503, text, code="unavailable")


class Writer:
    """Runs commands on a core, one batch at a time.

    Args:
        open_core: opens and reads the store. Called again after a failed transaction.
        poll: asks for the answer to a waiting request.
        on_crash: called in the loop if the thread dies of an unexpected error.

    Raises:
        StoreError: the store cannot be opened or is damaged.
    """

    def __init__(
        self, open_core: Open, poll: Poll, on_crash: Callable[[], None] = lambda: None
    ) -> None:
        self._open = open_core
        self._poll = poll
        self._on_crash = on_crash
        self.stats = Stats()
        self.core: TransactionLog = self._timed_open()
        self._queue: queue.Queue[_Call | None] = queue.Queue(MAX_QUEUE)
        self._numbers = count()
        self._left: list[_Call] = []  # calls of the last batch that did not fit into its time
        self._waiting: dict[str, dict[str, _Call]] = {}
        self._results: list[tuple[asyncio.Future[Any], Any]] = []
        self._broken = ""
        self._retry_at = 0.0
        self._looked = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="mux-writer")

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self.core.close()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and the store can be written."""
        return self._thread.is_alive() and not self._broken

    @property
    def ailing(self) -> str:
        """A message if the scheduler fails repeatedly on some events, else empty."""
        many = len(self.core.setbacks)
        events = "1 event that is" if many == 1 else f"{many} events that are"
        return f"the scheduler fails on {events} due: see the daemon's log" if many else ""

    async def call(
        self, command: Command, wait_s: float | None = None, *, beat: bool = False
    ) -> Any:
        """Run a command in the next batch, heartbeats (``beat``) first. Raises ``Refused``.

        Returns None if a wait takes longer than ``wait_s``.
        """
        assert self._loop is not None
        call = _Call(command, self._loop.create_future(), (not beat, next(self._numbers)))
        try:
            self._queue.put_nowait(call)
        except queue.Full:
            raise unavailable("too many requests are waiting") from None
        if wait_s is None:
            return await call.future
        try:
            return await asyncio.wait_for(call.future, wait_s)
        except TimeoutError:
            return None

    async def read(self, look: Callable[[TransactionLog], Any]) -> Any:
        return await self.call(look)

    def _timed_open(self) -> TransactionLog:
        began = time.perf_counter()
        core = self._open()
        self.stats.recovery_s = time.perf_counter() - began
        return core

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._on_crash)
            raise

    def _serve(self) -> None:
        going = True
        while going or self._left:
            batch = list[_Call]()
            try:
                going = self._collect(batch) and going
                self._round(batch)
            except Exception as error:
                # The state on disk is still good, so read it again.
                _log.exception("the writer failed")
                self._fail(error)
                self._refuse_all(batch)
            self._deliver()
        if not self._broken:
            self.core.store.set_closed(True)

    def _round(self, batch: list[_Call]) -> None:
        if self._broken and not self._repair():
            self._refuse_all(batch)
            return
        self._work(batch)

    def _collect(self, batch: list[_Call]) -> bool:
        timeout = _RETRY_S if self._broken else self._pause()
        new = 0
        try:
            call = self._queue.get_nowait() if self._left else self._queue.get(timeout=timeout)
            while call is not None:
                batch.append(call)
                new += 1
                if new == MAX_BATCH:
                    return True
                call = self._queue.get_nowait()
        except queue.Empty:
            return True
        finally:
            batch += self._left
            batch.sort(key=lambda each: each.turn)
            self._left = []
        return False

    def _pause(self) -> float | None:
        due = self.core.next_deadline()
        return None if due is None else min(due, self.core.ttl / _LOOKS)

    def _work(self, batch: list[_Call]) -> None:
        """One transaction. If the scheduler fails on a request, repeat the others."""
        outcomes: list[tuple[_Call, Outcome | Refused]] = []
        while True:
            outcomes.clear()
            until = time.monotonic() + COMMIT_S
            try:
                self._expire()
                for call in batch:
                    outcomes.append((call, self._outcome(call)))
                    if time.monotonic() >= until:
                        break
                self._commit()
                break
            except Poisoned as poison:
                self._undo()
                text = f"the scheduler failed on this request ({poison}) and changed nothing"
                call = batch.pop(len(outcomes))
                self._results.append((call.future, Refused(500, text, code="poisoned")))
            except (UnavailableError, StoreError) as error:
                self._fail(error)
                self._refuse_all(batch)
                return
        self._left = batch[len(outcomes) :]
        self._settle(outcomes)
        self._answer_waiting()

    def _expire(self) -> None:
        looked, self._looked = self._looked, time.monotonic()
        if self._looked - looked > 2 * self.core.ttl / _LOOKS:
            self.core.leased.renew_agents(self.core.now())
        put_off = None
        while put_off != self.core.setbacks:
            put_off = dict(self.core.setbacks)
            try:
                self.core.expire()
                return
            except (UnavailableError, StoreError):
                raise
            except Exception:
                # Requests must be answered even if due events fail.
                self._undo()

    def _undo(self) -> None:
        self.stats.poisoned += 1
        self.core.undo()

    def _outcome(self, call: _Call) -> Outcome | Refused:
        seq = self.core.leased.seq
        try:
            return call.command(self.core)
        except Refused as refused:
            return refused
        except (Poisoned, UnavailableError, StoreError):
            raise
        except Exception as error:
            if self.core.leased.seq != seq:
                raise Poisoned(f"{type(error).__name__}: {error}") from error
            return self._failed(error)

    def _failed(self, error: Exception) -> Refused:
        """A request or its answer failed with nothing recorded. The next request may succeed."""
        self.stats.poisoned += 1
        _log.error("a request failed", exc_info=error)
        text = f"this request failed ({type(error).__name__}: {error}) and changed nothing"
        return Refused(500, text, code="poisoned")

    def _commit(self) -> None:
        began = time.perf_counter()
        entries = self.core.commit()
        if entries:
            self._observe(entries, time.perf_counter() - began)

    def _observe(self, count: int, seconds: float) -> None:
        try:
            self.stats.observe(count, seconds)
        except Exception:
            _log.exception("a commit could not be counted")

    def _settle(self, outcomes: list[tuple[_Call, Outcome | Refused]]) -> None:
        for call, outcome in outcomes:
            if not isinstance(outcome, NoPermitYet):
                self._results.append((call.future, outcome))
                continue
            waiting = self._waiting.setdefault(outcome.job, {})
            older = waiting.pop(outcome.key, None)
            if older is not None:
                self._results.append((older.future, Answer(204, None)))
            waiting[outcome.key] = call

    def _answer_waiting(self) -> None:
        """After a commit, ask again for the waiting requests of changed jobs."""
        touched = self.core.leased.touched
        for job in touched & self._waiting.keys():
            for key, call in list(self._waiting[job].items()):
                outcome = self._polled(job, key)
                if not isinstance(outcome, NoPermitYet) or call.future.done():
                    del self._waiting[job][key]
                if not isinstance(outcome, NoPermitYet):
                    self._results.append((call.future, outcome))
            if not self._waiting[job]:
                del self._waiting[job]
        touched.clear()

    def _polled(self, job: str, key: str) -> Outcome | Refused:
        try:
            return self._poll(self.core, job, key)
        except Refused as refused:
            return refused
        except Exception as error:
            return self._failed(error)

    def _fail(self, error: Exception) -> None:
        self.stats.failures += 1
        self._broken = str(error) or type(error).__name__
        self._retry_at = time.monotonic() + _RETRY_S

    def _refuse_all(self, batch: list[_Call]) -> None:
        refused = unavailable(self._broken)
        self._results.extend((call.future, refused) for call in batch)

    def _repair(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        try:
            self._reopen()
        except (UnavailableError, StoreError) as error:
            self._fail(error)
            return False
        self._broken = ""
        return True

    def _reopen(self) -> None:
        before = self.core
        before.store.close()
        self.core = self._timed_open()
        self.core.follow(before)
        self.core.leased.touched.update(self._waiting)

    def _deliver(self) -> None:
        results, self._results = self._results, []
        if results and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_set_all, results)


def _set_all(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, Refused):
            future.set_exception(result)
        else:
            future.set_result(result)
