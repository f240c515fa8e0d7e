"""verl's worker of agent loops, which runs the attempts that the policy decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
import transfer_queue as tq  # pyright: ignore[reportMissingImports]

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.verl.host import PlainClient, PlainWorker
from rollpacker.verl.round_driver import (
    AttemptStopped,
    Broken,
    InOrder,
    Report,
    ResponseFinished,
    Stored,
)


class Cancelling:
    """An actor's handle, whose calls are cancelled with the coroutine that waits for them.

    Cancelling the wait for an actor's call leaves the call running. verl's own abort does not reach
    vLLM if that renames requests. ``ray.cancel`` raises in the actor's coroutine, and every server
    then drops the request.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._actor, name))


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return _result(self._method.remote(*args, **kwargs))


async def _result(reference: Any) -> Any:
    waiting = asyncio.ensure_future(_value(reference))
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        ray.cancel(reference)
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # retrieved, so that asyncio does not log it
        raise


async def _value(reference: Any) -> Any:
    return await reference


class _Cancelled:
    def __getattr__(self, name: str) -> Any:
        return self

    def remote(self, *_args: Any, **_kwargs: Any) -> Any:
        raise asyncio.CancelledError


class CancellingClient(PlainClient):
    """verl's client of its servers. Cancelling the wait for a response stops its request."""

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **extra))
        try:
            name, server = await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            # The balancer has counted it, and verl releases only a server that it got.
            name, _ = await acquiring
            return name, _Cancelled()
        return name, Cancelling(server)


@dataclass(slots=True, eq=False)
class _Attempt:
    """One response: verl's session, and the policy's decisions about it."""

    id: AttemptId
    prompt: PromptId
    start_s: float
    wanted: asyncio.Future[None]  # done when its reward is asked for
    kept: asyncio.Future[None]  # done when it is trained on
    task: asyncio.Task[None]
    tokens: int | None = None
    stop_s: float | None = None  # when it got the decision to stop
    told: bool = False  # whether the policy knows how it ended


@dataclass(slots=True, eq=False)
class _Hosted:
    """A prompt of the round: verl's row, and how to run it."""

    row: dict[str, Any]
    params: dict[str, Any]
    trajectory: dict[str, Any]
    trace: bool
    attempts: dict[int, _Attempt] = field(default_factory=dict[int, _Attempt])
    """By sample index, the latest attempt of each."""
    unstored: set[AttemptId] = field(default_factory=set[AttemptId])
    """Kept, but not in the transfer queue yet."""


class Worker(PlainWorker):
    """``AgentLoopWorkerTQ`` that runs each attempt of a training prompt as the policy decides. A
    response enters the transfer queue once the policy has kept it. Validation is verl's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.reward_loop_worker_handles is not None:
            self.reward_loop_worker_handles = [
                Cancelling(handle) for handle in self.reward_loop_worker_handles
            ]
        self._hosted: dict[PromptId, _Hosted] = {}
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._inbox: InOrder[Sequence[do.Decision]] = InOrder()
        self._outbox: list[Report] = []
        self._sent = 0
        self._storing: set[asyncio.Task[None]] = set()
        self._performers: dict[type, Callable[[Any], None]] = {
            do.StartAttempt: self._start,
            do.AbortAttempt: self._abort,
            do.GradeAttempt: self._grade,
            do.AcceptGroup: self._accept,
            do.FinishRollout: self._finish,
        }

    async def follow(self, policy: Any, number: int) -> None:
        self._policy, self._number = policy, number

    async def live(self) -> None:
        """Never returns, so that waiting for it shows this worker's death."""
        await asyncio.get_running_loop().create_future()

    async def decide(self, number: int, decisions: Sequence[do.Decision]) -> None:
        for batch in self._inbox.take(number, decisions):
            for decision in batch:
                self._performers[type(decision)](decision)

    async def _run_prompt(
        self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False
    ) -> None:
        if trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace=trace)
            return
        # No await before this line, as the prompt must be here before its first attempt.
        self._hosted[PromptId(prompt["uid"])] = _Hosted(prompt, sampling_params, trajectory, trace)

    async def _compute_score(self, outputs: list[Any], kwargs: dict) -> None:
        """Grade a response when the policy asks for it, and end its session unless it is kept."""
        hosted = self._hosted.get(PromptId(kwargs["uid"]))
        if hosted is None:
            await super()._compute_score(outputs, kwargs)
            return
        attempt = hosted.attempts[kwargs["session_id"]]
        self._tell(self._finished(attempt, outputs))
        await attempt.wanted
        try:
            await super()._compute_score(outputs, kwargs)
        except Exception as error:
            attempt.told = True
            self._tell(ev.GradingFailed(attempt=attempt.id, error=_text(error)))
            raise
        reward = outputs[-1].reward_score
        self._tell(
            ev.AttemptGraded(attempt=attempt.id, reward=None if reward is None else float(reward))
        )
        await attempt.kept

    def _finished(self, attempt: _Attempt, outputs: list[Any]) -> ResponseFinished:
        attempt.tokens = sum(sum(output.response_mask) for output in outputs)
        cut = len(outputs[-1].response_ids) >= self.rollout_config.response_length
        return ResponseFinished(
            attempt=attempt.id,
            tokens=attempt.tokens,
            finish_reason="length" if cut else "stop",
            seconds=time.monotonic() - attempt.start_s,
        )

    # Decisions of the policy ------------------------------------------------------------------

    def _start(self, decision: do.StartAttempt) -> None:
        loop, hosted = asyncio.get_running_loop(), self._hosted[decision.prompt]
        session = self._run_agent_loop(
            dict(hosted.params),
            trajectory=hosted.trajectory,
            trace=hosted.trace,
            session_id=decision.index,
            **hosted.row,
        )
        attempt = _Attempt(
            id=decision.attempt,
            prompt=decision.prompt,
            start_s=time.monotonic(),
            wanted=loop.create_future(),
            kept=loop.create_future(),
            task=loop.create_task(session),
        )
        self._attempts[attempt.id] = hosted.attempts[decision.index] = attempt
        attempt.task.add_done_callback(partial(self._ended, attempt))

    def _abort(self, decision: do.AbortAttempt) -> None:
        attempt = self._attempts.get(decision.attempt)
        if attempt is not None:  # otherwise its failure is on its way to the policy
            attempt.stop_s = time.monotonic()
            attempt.task.cancel()

    def _grade(self, decision: do.GradeAttempt) -> None:
        wanted = self._attempts[decision.attempt].wanted
        if not wanted.done():
            wanted.set_result(None)

    def _accept(self, decision: do.AcceptGroup) -> None:
        self._hosted[decision.prompt].unstored = set(decision.attempts)
        for attempt in decision.attempts:
            self._attempts[attempt].kept.set_result(None)

    def _finish(self, _decision: do.FinishRollout) -> None:
        for attempt in self._attempts.values():
            if not attempt.kept.done():
                attempt.told = True
                attempt.task.cancel()
        # Not earlier, or an audited response that ends after its group would count as validation.
        self._hosted = {prompt: each for prompt, each in self._hosted.items() if each.unstored}

    # Ended attempts ---------------------------------------------------------------------------

    def _ended(self, attempt: _Attempt, task: asyncio.Task[None]) -> None:
        del self._attempts[attempt.id]
        error = None if task.cancelled() else task.exception()
        if attempt.told:
            return
        if attempt.stop_s is not None:
            seconds = attempt.stop_s - attempt.start_s
            self._tell(AttemptStopped(attempt=attempt.id, tokens=attempt.tokens, seconds=seconds))
        elif attempt.kept.done() and not attempt.kept.cancelled():
            self._store(attempt, error)
        else:
            text = "its session returned nothing" if error is None else _text(error)
            self._tell(ev.AttemptFailed(attempt=attempt.id, error=text))

    def _store(self, attempt: _Attempt, error: BaseException | None) -> None:
        if error is not None:
            self._tell(Broken(error=f"a kept response of {attempt.prompt}: {_text(error)}"))
            return
        hosted = self._hosted[attempt.prompt]
        hosted.unstored.discard(attempt.id)
        if not hosted.unstored:
            task = asyncio.get_running_loop().create_task(self._publish(attempt.prompt))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)

    async def _publish(self, prompt: PromptId) -> None:
        try:
            await tq.async_kv_put(key=prompt, partition_id="train", tag={"status": "finished"})
        except Exception as error:
            self._tell(Broken(error=f"the transfer queue, for {prompt}: {_text(error)}"))
            return
        self._tell(Stored(prompt=prompt))

    def _tell(self, report: Report) -> None:
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._report)
        self._outbox.append(report)

    def _report(self) -> None:
        reports, self._outbox = self._outbox, []
        self._policy.report.remote(self._number, self._sent, reports)
        self._sent += 1


def _text(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"
