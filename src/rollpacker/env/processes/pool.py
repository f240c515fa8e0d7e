"""Environments in processes that may hang, crash or be killed without harm to other episodes.

The pool belongs to one event loop (or to a caller that waits). Each episode is in one process, with
many others. One that raises or takes too long fails alone. One that takes its process down takes
others along: these are told to be blameless, and where it is not clear whose fault it was, each
that may have done it begins again in a process of its own. Of such processes there are as many at a
time as of the others.
"""

from __future__ import annotations

import asyncio
import pickle
import select
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollpacker.config import EnvironmentConfig
from rollpacker.env.episode import TIMED_OUT
from rollpacker.env.messages import (
    Begin,
    Close,
    EnvironmentAnswer,
    EnvironmentReady,
    Fatal,
    ModelReplied,
    Report,
)
from rollpacker.env.processes.process import Member, start
from rollpacker.env.tool_faults import PROMPTS

_CHECK_S = 0.25
_GRACE_S = 2.0
"""Beyond its own limit, in which a process answers that an environment timed out."""
_STARTS = 5
_MOST_SAID = 100
"""Lines for the user that are kept until they are told."""


@dataclass(frozen=True, slots=True)
class EpisodeReply:
    """An answer; ``blameless``: its error is another episode's."""

    answer: EnvironmentAnswer
    blameless: bool = False


Take = Callable[[Sequence[EpisodeReply]], None]


class EnvironmentPool:
    """The processes of environments of one run.

    Args:
        config: of the environment.
        tokenizer: the model's; goes to the processes.
        template: arguments of the chat template.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Any,
        template: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._tokenizer = pickle.dumps(tokenizer)
        self._vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._template = dict(template)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._take: Take = lambda _replies: None
        self._checking: asyncio.TimerHandle | None = None
        self._at: dict[int, Member] = {}
        self._keys: dict[int, Hashable] = {}
        self._room: dict[int, int] = {}
        self._suspects: set[Hashable] = set()
        self._failing: set[Hashable] = set()
        """Whose calls have failed: of few, a process says in vain that its tools are broken."""
        self._lost: dict[int, EpisodeReply] = {}
        self._queue: OrderedDict[int, tuple[Begin, Hashable]] = OrderedDict()
        self._said: list[str] = []
        self._failed_starts = 0
        self.broken: str | None = None
        """Why no episode can begin any more."""
        self.tools: list[dict[str, Any]] = []
        """JSON schemas of the tools that every prompt has."""
        self._members = [self._start() for _ in range(config.processes)]

    # What the driver calls ---------------------------------------------------------------------

    def wait_ready(self) -> None:
        """Wait until every process has loaded the environment. Raises ``ValueError``."""
        while self.broken is None and not all(member.ready for member in self._members):
            channels = [member.channel for member in self._members]
            writing = [channel for channel in channels if channel.unsent]
            select.select(channels, writing, [], _CHECK_S)
            for channel in writing:
                channel.flush()
            self._check()
        if self.broken is not None:
            raise ValueError(self.broken)

    def attach(self, loop: asyncio.AbstractEventLoop, take: Take) -> None:
        """Read answers in this loop, and hand them to ``take``."""
        self._loop, self._take = loop, take
        for member in self._members:
            self._listen(member)

    def begin(self, command: Begin, key: Hashable) -> None:
        """Begin an episode; ``key`` stays the same where it begins again. Never waits."""
        self._queue[command.episode] = command, key
        self._dispatch()

    def step(self, command: ModelReplied) -> None:
        """The model has replied. Never waits."""
        member = self._at.get(command.episode)
        if member is None:
            lost = self._lost.pop(command.episode, None)
            if lost is not None:
                assert self._loop is not None
                self._loop.call_soon(self._take, [lost])
            return
        member.episodes[command.episode] = time.monotonic()
        self._room[command.episode] = command.left
        self._tell(member, command)
        self._check_later()

    def close_episode(self, episode: int) -> None:
        """It is given up: nothing comes of it. Unknown ones are ignored."""
        member = self._at.get(episode)
        if member is None:
            self._lost.pop(episode, None)
            self._queue.pop(episode, None)
            return
        member.abandoned = True  # its end is not heard of, and may bring the process down
        self._tell(member, Close(episode))
        self._forget(episode)
        self._dispatch()

    @property
    def queued(self) -> int:
        """How many episodes have not begun, as others have to end first."""
        return len(self._queue)

    def said(self) -> list[str]:
        """What the user should know and was not told yet."""
        said, self._said = self._said, []
        return said

    def close(self) -> None:
        """End all processes."""
        if self._checking is not None:
            self._checking.cancel()
        for member in self._members:
            self._unlisten(member)
            member.kill()
        self._members = []

    # Episodes ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        most = self._config.concurrency
        queue, passed = self._queue, list[tuple[Begin, Hashable]]()
        while queue and not (most and len(self._at) >= most):
            episode, (command, key) = queue.popitem(last=False)
            member = self._place(key)
            if member is None:
                passed.append((command, key))
                continue
            self._at[episode], self._keys[episode] = member, key
            self._room[episode] = command.room
            member.episodes[episode] = time.monotonic()
            self._tell(member, command)
        for command, key in reversed(passed):
            queue[command.episode] = command, key
            queue.move_to_end(command.episode, last=False)
        self._separate()
        if self._at or self._queue:
            self._check_later()

    def _place(self, key: Hashable) -> Member | None:
        """Where an episode may go now."""
        ready = [member for member in self._members if member.ready and not member.leaving]
        if key not in self._suspects:
            shared = [member for member in ready if not member.alone]
            return min(shared, key=lambda member: len(member.episodes), default=None)
        return next((member for member in ready if member.alone and not member.episodes), None)

    def _separate(self) -> None:
        """Processes of one episode: for those that wait for one, and no others."""
        alone = [member for member in self._members if member.alone]
        if self.broken is not None or not (self._suspects or alone):
            return
        waiting = sum(key in self._suspects for _, key in self._queue.values())
        idle = [member for member in alone if not member.episodes]
        for member in idle[waiting:]:
            self._retire(member)
        more = min(waiting - len(idle), self._config.processes - len(alone))
        self._members += [self._start(alone=True) for _ in range(more)]

    def _forget(self, episode: int) -> None:
        member = self._at.pop(episode, None)
        self._keys.pop(episode, None)
        self._room.pop(episode, None)
        if member is not None:
            member.episodes.pop(episode, None)
            if not member.episodes and (member.leaving or member.alone):
                self._retire(member)

    def _retire(self, member: Member) -> None:
        """A process that is not wanted any more."""
        if member in self._members:
            self._members.remove(member)
            self._unlisten(member)
            member.kill()

    # What the processes say --------------------------------------------------------------------

    def _read(self, member: Member) -> list[EpisodeReply]:
        reports, gone = member.hear()
        replies = [reply for report in reports for reply in self._heard(member, report)]
        if gone is not None and member in self._members:
            replies += self._replace(member, gone)
        return replies

    def _heard(self, member: Member, report: Report) -> list[EpisodeReply]:
        match report:
            case EnvironmentReady():
                if not member.ready:
                    member.ready = True
                    self._failed_starts = 0
                    self.tools = report.tools
                for line in report.warnings[:_MOST_SAID]:
                    if line not in self._said:
                        self._say(line)
            case Fatal() if not member.ready or len(self._failing) >= PROMPTS:
                said = report.error
                self.broken = said if said.startswith("environment") else f"environment: {said}"
            case EnvironmentAnswer() if self._at.get(report.episode) is member:
                return [EpisodeReply(self._checked(member, report))]
            case _:
                pass
        return []

    def _say(self, line: str) -> None:
        if len(self._said) < _MOST_SAID:
            self._said.append(line)

    def _checked(self, member: Member, answer: EnvironmentAnswer) -> EnvironmentAnswer:
        """An answer as the run can take it; with others an episode is over."""
        member.episodes[answer.episode] = None
        if answer.failed_calls and len(self._failing) < PROMPTS:
            self._failing.add(self._keys[answer.episode])
        if problem := self._problem(answer):
            self._tell(member, Close(answer.episode))
            answer = EnvironmentAnswer(episode=answer.episode, error=problem)
        if answer.over or answer.error:
            self._suspects.discard(self._keys[answer.episode])
            member.leaving = member.leaving or answer.error.startswith(TIMED_OUT)
            self._forget(answer.episode)
            self._fill()
        return answer

    def _problem(self, answer: EnvironmentAnswer) -> str:
        """What is wrong with token ids: they go to an engine and into the weights."""
        for what, data in (("prompt", answer.prompt), ("tokens", answer.tokens)):
            ids, room = np.frombuffer(data, np.int32), self._room[answer.episode]
            if len(ids) > room:
                return f"its process sent {what} of {len(ids)} ids where {room} had room"
            strange = ids[(ids < 0) | (ids >= self._vocabulary)]
            if len(strange):
                own = f"the tokenizer has ids below {self._vocabulary}"
                return f"its process sent {what} with id {strange[0]}: {own}"
        return ""

    def _replace(self, member: Member, why: str) -> list[EpisodeReply]:
        """A process is gone, or must go. Who waits for an answer has none; who does not will know
        when it steps."""
        self._members.remove(member)
        self._unlisten(member)
        ended = member.kill()
        error = f"its process {why or ended}"
        if not member.ready:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                self.broken = f"environment: its processes do not start: the last {why or ended}"
        replies = self._lose(member, error)
        self._say(f"a process of environments {why or ended}")
        self._fill()
        return replies

    def _lose(self, member: Member, error: str) -> list[EpisodeReply]:
        """Its episodes are gone. Who acted may have done it; if nobody did, any of them."""
        acting = [episode for episode, since in member.episodes.items() if since is not None]
        suspects = acting or list(member.episodes)
        clear = len(suspects) == 1 and (member.alone or bool(acting)) and not member.abandoned
        replies: list[EpisodeReply] = []
        for episode in list(member.episodes):
            guilty = clear and episode in suspects
            reply = EpisodeReply(
                EnvironmentAnswer(episode=episode, error=error), blameless=not guilty
            )
            if episode in suspects and not guilty:
                self._suspects.add(self._keys[episode])
            if episode in acting:
                replies.append(reply)
            else:
                self._lost[episode] = reply
            self._at.pop(episode, None)
            self._keys.pop(episode, None)
            self._room.pop(episode, None)
        return replies

    def _fill(self) -> None:
        """As many processes as there are to be, besides those that leave or are of one episode."""
        staying = sum(not (member.leaving or member.alone) for member in self._members)
        if self.broken is None:
            self._members += [self._start() for _ in range(self._config.processes - staying)]

    def _check(self) -> list[EpisodeReply]:
        """Hear all of them, and end those that hang."""
        replies: list[EpisodeReply] = []
        for member in tuple(self._members):
            replies += self._read(member)
            if member not in self._members:
                continue
            now = time.monotonic()
            if not member.ready:
                limit = self._config.start_timeout_s
                if now - member.started > limit:
                    late = f"did not start in {limit:g} s (environment.start_timeout_s)"
                    replies += self._replace(member, late)
                continue
            limit = self._config.step_timeout_s + _GRACE_S
            late = [s for s in member.episodes.values() if s is not None and now - s > limit]
            if late:
                text = f"hung for {limit:g} s (environment.step_timeout_s)"
                replies += self._replace(member, text)
        return replies

    # Processes and the event loop --------------------------------------------------------------

    def _start(self, alone: bool = False) -> Member:
        member = start(self._config, self._tokenizer, self._template)
        member.alone = alone
        self._listen(member)
        return member

    def _listen(self, member: Member) -> None:
        if self._loop is not None:
            self._loop.add_reader(member.channel, self._on_readable, member)
            self._flush_later(member)

    def _unlisten(self, member: Member) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(member.channel)
            self._loop.remove_writer(member.channel)

    def _tell(self, member: Member, command: Begin | ModelReplied | Close) -> None:
        member.tell(command)
        self._flush_later(member)

    def _flush_later(self, member: Member) -> None:
        if self._loop is not None and member.channel.unsent:
            self._loop.add_writer(member.channel, self._on_writable, member)

    def _on_writable(self, member: Member) -> None:
        assert self._loop is not None
        if member.channel.flush():
            self._loop.remove_writer(member.channel)

    def _on_readable(self, member: Member) -> None:
        self._deliver(self._read(member))

    def _deliver(self, replies: Sequence[EpisodeReply]) -> None:
        self._dispatch()
        if replies or self.broken is not None:
            self._take(replies)

    def _check_later(self) -> None:
        if self._loop is not None and self._checking is None:
            self._checking = self._loop.call_later(_CHECK_S, self._on_check)

    def _on_check(self) -> None:
        self._checking = None
        # First: whatever comes of this look, there is another one.
        if self._at or self._queue:
            self._check_later()
        self._deliver(self._check())
