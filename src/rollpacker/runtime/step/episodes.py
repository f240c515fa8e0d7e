"""Attempts at their environments: begin, replies of the model, end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from rollpacker.config import EnvironmentConfig
from rollpacker.core.types import AttemptId, PromptId
from rollpacker.engine.base import Request, SamplingParams
from rollpacker.env.messages import Begin, EnvironmentAnswer, ModelReplied, packed
from rollpacker.env.processes.pool import EnvironmentPool, EpisodeReply
from rollpacker.errors import told
from rollpacker.runtime.attempts.attempts import (
    EpisodeRecord,
    Problems,
    Trajectory,
    TrajectoryStage,
    lengthened,
)
from rollpacker.runtime.ipc.clock import Clock


@dataclass(frozen=True, slots=True)
class Answered:
    """An environment's answer to an attempt.

    Args:
        attempt: with the answer in its tokens and conversation.
        tokens: that the environment put in.
        seconds: of waiting for it.
        error: why it failed, or empty.
        blameless: another episode's fault.
    """

    attempt: Trajectory
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""
    blameless: bool = False

    @property
    def over(self) -> bool:
        conversation = self.attempt.conversation
        return not self.error and conversation is not None and bool(conversation.over)


Take = Callable[[Sequence[EpisodeReply]], None]


class Episodes:
    """The environments of a run's attempts.

    Args:
        most: most tokens that the model samples in all turns of a response.
        total: most tokens of a response with the environment's tokens.
        lockstep: ``settle`` returns answers when all are there, in a fixed order.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool,
        *,
        most: int,
        total: int,
        context: int,
        lockstep: bool,
        clock: Clock,
    ) -> None:
        self._config = config
        self._pool = pool
        self._most = most
        self._total = total
        self._context = context
        self._lockstep = lockstep
        self._clock = clock
        self._live: set[AttemptId] = set()
        self._acting: dict[AttemptId, tuple[Trajectory, float]] = {}
        self._answers: list[Answered] = []
        self._listener: Take = lambda _replies: None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pool.attach(loop, lambda replies: self._listener(replies))

    @contextlib.contextmanager
    def listen(self, take: Take) -> Iterator[None]:
        before, self._listener = self._listener, take
        try:
            yield
        finally:
            self._acting.clear()
            self._answers.clear()
            for attempt in list(self._live):
                self._end(attempt)
            self._listener = before

    # What is to be done ------------------------------------------------------------------------

    def begin(self, attempt: Trajectory, problems: Problems) -> None:
        assert problems.chat is not None
        row = problems.rows[attempt.prompt]
        attempt.conversation = EpisodeRecord()
        self._live.add(attempt.id)
        self._wait_for(attempt)
        chat = problems.chat(row)
        command = Begin(
            episode=attempt.id,
            row=packed({**row.columns, "prompt": chat}),
            prompt=chat,
            tools=list(row.tools),
            template=dict(row.template_kwargs),
            room=self._context - self._total,
        )
        self._pool.begin(command, (attempt.prompt, attempt.index))

    def step(self, attempt: Trajectory) -> None:
        output, conversation = attempt.output, attempt.conversation
        assert output is not None
        assert conversation is not None
        reply = np.ascontiguousarray(output.tokens[-conversation.turns[-1].sampled :], np.int32)
        self._wait_for(attempt)
        command = ModelReplied(
            episode=attempt.id,
            reply=reply.tobytes(),
            left=self._total - len(output.tokens),
            left_sampled=self._most - attempt.tokens,
            cut=output.finish_reason == "length",
        )
        self._pool.step(command)

    def _wait_for(self, attempt: Trajectory) -> None:
        attempt.stage = TrajectoryStage.ACTING
        self._acting[attempt.id] = attempt, self._clock()

    def close(self, attempt: Trajectory) -> None:
        self._acting.pop(attempt.id, None)
        self._answers = [each for each in self._answers if each.attempt is not attempt]
        self._end(attempt.id)

    def _end(self, attempt: AttemptId) -> None:
        if attempt in self._live:
            self._live.discard(attempt)
            self._pool.close_episode(attempt)

    def request(self, request: Request, attempt: Trajectory) -> Request:
        begun = attempt.begun
        if begun is not None:
            request = replace(request, generated=begun.tokens, logprobs=begun.logprobs)
        added = [] if attempt.conversation is None else attempt.conversation.added
        return replace(
            request,
            group=self._group(attempt),
            params=self._params(attempt, request.params),
            stays=True,
            turn_start=added[-1][1] if added else 0,
        )

    def _group(self, attempt: Trajectory) -> PromptId:
        """The group of its prompt, or its own one if its environment has replaced the prompt."""
        conversation = attempt.conversation
        if conversation is None or not conversation.changed:
            return attempt.prompt
        digest = blake2b(attempt.prompt_tokens.tobytes(), digest_size=8).hexdigest()
        return PromptId(f"{attempt.prompt}#{digest}")

    def _params(self, attempt: Trajectory, params: SamplingParams) -> SamplingParams:
        put_in = 0 if attempt.conversation is None else attempt.conversation.put_in
        most = min(self._total, put_in + self._most)
        return replace(params, max_tokens=most)

    # What happened -----------------------------------------------------------------------------

    @property
    def broken(self) -> str | None:
        """Why no episode can begin any more."""
        return self._pool.broken

    def said(self) -> list[str]:
        return self._pool.said()

    @property
    def acting(self) -> bool:
        """Whether an environment works, not counting those that wait for another episode's end."""
        return len(self._acting) > self._pool.queued

    def settle(self) -> list[Answered]:
        """In lockstep, the answers when no environment works, in a fixed order."""
        if self.acting:
            return []
        answers, self._answers = self._answers, []
        return sorted(answers, key=lambda answered: answered.attempt.id)

    def take(self, replies: Sequence[EpisodeReply]) -> list[Answered]:
        """Apply replies and return the answers. In lockstep ``settle`` returns them."""
        answers = [each for reply in replies if (each := self._answered(reply)) is not None]
        if not self._lockstep:
            return answers
        self._answers += answers
        return []

    def _answered(self, reply: EpisodeReply) -> Answered | None:
        answer = reply.answer
        known = self._acting.pop(AttemptId(answer.episode), None)
        if known is None:
            return None
        attempt, since = known
        if answer.over or answer.error:
            self._live.discard(attempt.id)
        seconds = self._clock() - since
        if answer.error and (self._config.on_error == "retry" or reply.blameless):
            return Answered(attempt, error=answer.error, blameless=reply.blameless)
        try:
            self._enter(attempt, answer, seconds)
        except Exception as error:  # a user's process may send anything: only its episode fails
            self._end(attempt.id)
            return Answered(attempt, error=f"its answer cannot be taken: {told(error)}")
        return Answered(attempt, len(answer.tokens) // 4, round(seconds, 6))

    def _enter(self, attempt: Trajectory, answer: EnvironmentAnswer, seconds: float) -> None:
        conversation, output = attempt.conversation, attempt.output
        assert conversation is not None
        conversation.take(answer, seconds)
        if answer.error:
            conversation.over, conversation.failed = "stop", answer.error
            conversation.rewards = [self._config.failed_reward]
        if answer.prompt:
            attempt.prompt_tokens = np.frombuffer(answer.prompt, np.int32)
            conversation.changed = True
        if output is None:
            return
        added = np.frombuffer(answer.tokens, np.int32)
        if len(added):
            conversation.add(len(output.tokens), len(added))
        attempt.go_on(lengthened(output, added))
