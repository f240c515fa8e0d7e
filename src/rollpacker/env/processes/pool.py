"""Environments in processes that may hang, crash or be killed without harm to other episodes.

The pool belongs to one event loop, or to a caller that waits. An episode that raises or takes too
long fails alone. If an episode ends its process, the other episodes there fail as blameless. If it
is not clear which one did it, each suspect begins again in a process of its own, of which there are
at most as many as shared ones.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from rollpacker.config import EnvironmentConfig
from rollpacker.env.base import PROMPTS
from rollpacker.env.episode import TIMED_OUT
from rollpacker.env.messages import (
    Begin,
    Close,
    Command,
    EnvironmentAnswer,
    EnvironmentReady,
    Fatal,
    ModelReplied,
    Report,
)
from rollpacker.processes.fork_server import fork_child
from rollpacker.processes.frames import Channel, check_values, frame
from rollpacker.processes.supervised import SupervisedPool, SupervisedProcess

# A process of environments as the driver sees it: started, and given episodes.

_PRELOADED = (
    "rollpacker.env.processes.worker",
    "tokenizers",
    "transformers.convert_slow_tokenizer",
    "transformers.tokenization_utils_tokenizers",
)
"""Modules that each process imports anyway. The tokenizer's takes most of the start."""
LARGEST = 64 << 20
"""Bytes of an answer that are read. It may hold a whole conversation."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Report).decode


@dataclass(slots=True, eq=False)
class EnvironmentProcess(SupervisedProcess):
    """One process and its episodes.

    Args:
        episodes: each with the time at which its current work began. None: it waits for the model.
        leaving: it takes no more episodes, since one in it hangs.
        alone: it is for one episode, which may have ended its process before.
        abandoned: an episode was given up while it acted, and may still run.
    """

    episodes: dict[int, float | None] = field(default_factory=dict[int, "float | None"])
    leaving: bool = False
    alone: bool = False
    abandoned: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.episodes)


def read(data: bytes) -> Report:
    """Decode a process's message. Raises ``ValueError`` if it is not allowed."""
    check_values(data)
    return _decode(data)


def start(
    config: EnvironmentConfig, tokenizer: bytes, template: dict[str, Any]
) -> EnvironmentProcess:
    """Start a process that loads the environment and then takes episodes. ``tokenizer`` is pickled.
    ``template`` has the chat template's own arguments."""
    popen, ours = fork_child("rollpacker.env.processes.worker", _PRELOADED)
    channel = Channel(ours, LARGEST)
    channel.send(frame(pickle.dumps((config, tokenizer, template))))
    return EnvironmentProcess(popen, channel, time.monotonic())


_GRACE_S = 2.0
"""Seconds beyond its own limit in which a process reports that an environment timed out."""
_STARTS = 5
_MOST_SAID = 100  # lines for the user in one message of a process


@dataclass(frozen=True, slots=True)
class EpisodeReply:
    """An answer. ``blameless``: another episode caused its error."""

    answer: EnvironmentAnswer
    blameless: bool = False


Take = Callable[[Sequence[EpisodeReply]], None]


@dataclass(frozen=True, slots=True)
class _Waits:
    # An episode that has not begun. ``number``: its place in the order of arrival.

    number: int
    command: Begin
    key: Hashable


@dataclass(slots=True)
class _Held:
    member: EnvironmentProcess
    key: Hashable
    room: int


class EnvironmentPool(SupervisedPool[EnvironmentProcess]):
    """The processes of environments of one run."""

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: Any,
        template: Mapping[str, Any],
    ) -> None:
        super().__init__("environment: its processes", _STARTS)
        self._config = config
        self._tokenizer = pickle.dumps(tokenizer)
        self._vocabulary = max(tokenizer.get_vocab().values(), default=-1) + 1
        self._template = dict(template)
        self._take: Take = lambda _replies: None
        self._at: dict[int, _Held] = {}
        self._suspects: set[Hashable] = set()
        self._failing: set[Hashable] = set()
        """Keys of episodes with failed calls. With few of them, tools do not count as broken."""
        self._unheard: dict[int, EpisodeReply] = {}
        """Errors of episodes that were lost while the model replied."""
        self._came: list[EpisodeReply] = []  # replies that were not taken yet
        self._begun = 0
        self._queue: OrderedDict[int, _Waits] = OrderedDict()
        self._alone: OrderedDict[int, _Waits] = OrderedDict()
        """Suspects, each of which waits for a process of its own."""
        self.tools: list[dict[str, Any]] = []  # JSON schemas of the tools that every prompt has
        self._fill()

    # Calls of the driver -----------------------------------------------------------------------

    def attach(self, loop: asyncio.AbstractEventLoop, take: Take) -> None:
        """Read answers in this loop, and hand them to ``take``."""
        self._loop, self._take = loop, take
        for member in self._members:
            self._listen(member)

    def begin(self, command: Begin, key: Hashable) -> None:
        """Begin an episode. ``key`` stays the same if it begins again. Never waits."""
        self._begun += 1
        queue = self._alone if key in self._suspects else self._queue
        queue[command.episode] = _Waits(self._begun, command, key)
        self._dispatch()

    def step(self, command: ModelReplied) -> None:
        """Pass the model's reply on. Never waits."""
        held = self._at.get(command.episode)
        if held is None:
            lost = self._unheard.pop(command.episode, None)
            if lost is not None:
                assert self._loop is not None
                self._loop.call_soon(self._take, [lost])
            return
        held.member.episodes[command.episode] = time.monotonic()
        held.room = command.left
        self._tell(held.member, command)
        self._check_later()

    def close_episode(self, episode: int) -> None:
        """Give an episode up: no answer follows. Unknown ones are ignored."""
        held = self._at.get(episode)
        if held is None:
            for waiting in (self._unheard, self._queue, self._alone):
                waiting.pop(episode, None)
            return
        held.member.abandoned = True  # it still runs unseen, and may end the process
        self._tell(held.member, Close(episode))
        self._forget(episode)
        self._dispatch()

    @property
    def queued(self) -> int:
        """How many episodes wait for others to end before they begin."""
        return len(self._queue) + len(self._alone)

    # Episodes ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        most = self._config.concurrency
        while not (most and len(self._at) >= most):
            place = self._oldest()
            if place is None:
                break
            queue, member = place
            episode, waits = queue.popitem(last=False)
            self._at[episode] = _Held(member, waits.key, waits.command.room)
            member.episodes[episode] = time.monotonic()
            self._tell(member, waits.command)
        self._separate()
        if self._working():
            self._check_later()

    def _oldest(self) -> tuple[OrderedDict[int, _Waits], EnvironmentProcess] | None:
        ready = [member for member in self._members if member.ready and not member.leaving]
        places = list[tuple[OrderedDict[int, _Waits], EnvironmentProcess]]()
        if self._queue and (shared := [member for member in ready if not member.alone]):
            places.append((self._queue, min(shared, key=lambda member: len(member.episodes))))
        if self._alone and (own := [m for m in ready if m.alone and not m.episodes]):
            places.append((self._alone, own[0]))
        return min(places, key=lambda place: next(iter(place[0].values())).number, default=None)

    def _separate(self) -> None:
        alone = [member for member in self._members if member.alone]
        if self.broken is not None or not (self._alone or alone):
            return
        waiting = len(self._alone)
        idle = [member for member in alone if not member.episodes]
        for member in idle[waiting:]:
            self._retire(member)
        more = min(waiting - len(idle), self._config.processes - len(alone))
        for member in self._start(more):
            member.alone = True

    def _forget(self, episode: int) -> None:
        member = self._at.pop(episode).member
        member.episodes.pop(episode)
        if not member.episodes and (member.leaving or member.alone) and member in self._members:
            self._retire(member)

    # Messages of the processes -----------------------------------------------------------------

    def _heard(self, member: EnvironmentProcess, data: bytes) -> None:
        match report := read(data):
            case EnvironmentReady():
                if not member.ready:
                    self._is_ready(member)
                    self.tools = report.tools
                for line in report.warnings[:_MOST_SAID]:
                    if line not in self._said:
                        self._say(line)
            case Fatal() if not member.ready or len(self._failing) >= PROMPTS:
                said = report.error
                self.broken = said if said.startswith("environment") else f"environment: {said}"
            case EnvironmentAnswer(episode=episode) if episode in self._at:
                if self._at[episode].member is member:
                    self._came.append(EpisodeReply(self._checked(self._at[episode], report)))
            case _:
                pass

    def _checked(self, held: _Held, answer: EnvironmentAnswer) -> EnvironmentAnswer:
        member = held.member
        member.episodes[answer.episode] = None
        if answer.failed_calls and len(self._failing) < PROMPTS:
            self._failing.add(held.key)
        if problem := self._problem(answer, held.room):
            self._tell(member, Close(answer.episode))
            answer = EnvironmentAnswer(episode=answer.episode, error=problem)
        if answer.over or answer.error:
            self._suspects.discard(held.key)
            member.leaving = member.leaving or answer.error.startswith(TIMED_OUT)
            self._forget(answer.episode)
            self._fill()
        return answer

    def _problem(self, answer: EnvironmentAnswer, room: int) -> str:
        # Token ids go to an engine and into the training, so they are checked.
        for what, data in (("prompt", answer.prompt), ("tokens", answer.tokens)):
            ids = np.frombuffer(data, np.int32)
            if len(ids) > room:
                return f"its process sent {what} of {len(ids)} ids where {room} had room"
            strange = ids[(ids < 0) | (ids >= self._vocabulary)]
            if len(strange):
                own = f"the tokenizer has ids below {self._vocabulary}"
                return f"its process sent {what} with id {strange[0]}: {own}"
        return ""

    # Processes -----------------------------------------------------------------------------------

    def _new(self) -> EnvironmentProcess:
        return start(self._config, self._tokenizer, self._template)

    def _missing(self) -> int:
        # Processes that leave or run one episode do not count.
        staying = sum(not (member.leaving or member.alone) for member in self._members)
        return self._config.processes - staying

    def _late(self, member: EnvironmentProcess, now: float) -> str | None:
        if not member.ready:
            limit = self._config.start_timeout_s
            late = f"did not start in {limit:g} s (environment.start_timeout_s)"
            return late if now - member.started > limit else None
        limit = self._config.step_timeout_s + _GRACE_S
        hang = any(s is not None and now - s > limit for s in member.episodes.values())
        return f"hung for {limit:g} s (environment.step_timeout_s)" if hang else None

    def _lost(self, member: EnvironmentProcess, why: str, ended: str) -> None:
        # Episodes that wait for an answer get an error now, the others at their next step. Acting
        # episodes are suspects; if none acted, all are.
        acting = [episode for episode, since in member.episodes.items() if since is not None]
        suspects = set(acting or member.episodes)
        clear = len(suspects) == 1 and (member.alone or bool(acting)) and not member.abandoned
        for episode in member.episodes:
            guilty = clear and episode in suspects
            error = f"its process {why or ended}"
            reply = EpisodeReply(
                EnvironmentAnswer(episode=episode, error=error), blameless=not guilty
            )
            if episode in suspects and not guilty:
                self._suspects.add(self._at[episode].key)
            if member.episodes[episode] is not None:
                self._came.append(reply)
            else:
                self._unheard[episode] = reply
            del self._at[episode]
        self._say(f"a process of environments {why or ended}")

    # The event loop ------------------------------------------------------------------------------

    def _working(self) -> bool:
        return bool(self._at or self.queued)

    def _go_on(self) -> None:
        self._dispatch()
        came, self._came = self._came, []
        if came or self.broken is not None:
            self._take(came)

    def _listen(self, member: EnvironmentProcess) -> None:
        super()._listen(member)
        if self._loop is not None:
            self._loop.add_reader(member.channel, self._on_readable, member)

    def _on_readable(self, member: EnvironmentProcess) -> None:
        self._read(member)
        self._go_on()

    def _tell(self, member: EnvironmentProcess, command: Command) -> None:
        self._write(member, [frame(_encode(command))])
