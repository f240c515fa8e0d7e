"""Engines and environments of scripted turns for the runtime on a virtual clock."""

import asyncio
from collections.abc import Callable

import numpy as np
from scripted_job import Script, scripted_turns

from rollpacker.config import EnvironmentConfig
from rollpacker.core.types import sampling_seed
from rollpacker.engine.fake import FakeEngine
from rollpacker.env.messages import EnvironmentAnswer
from rollpacker.env.processes.pool import EpisodeReply
from rollpacker.runtime.step.episodes import Episodes
from rollpacker.sim.world.agenda import Agenda

_ENOUGH = 1 << 20


class TurnEngine(FakeEngine):
    """Ends each turn where the script says so, counted in all tokens of the response."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.engine(), concurrency=script.concurrency)
        self._script = script

    def submit(self, requests) -> None:
        super().submit(requests)
        for request in requests:
            self._held[request.attempt].length = self._end(request.seed, len(request.generated))

    def _end(self, seed: int, known: int) -> int:
        """Of the turn that comes behind so many tokens."""
        end = 0
        for turn in scripted_turns(self._script, seed):
            if end + turn.tokens > known:
                return end + turn.tokens
            end += turn.tokens + turn.added
        raise AssertionError("asked for more than there is")


class VirtualEnvironments:
    """``EnvironmentPool`` without processes: answers as the script says, when it says so."""

    broken, queued = None, 0

    def __init__(self, script: Script, agenda: Agenda, step: Callable[[], int]) -> None:
        self._script, self._agenda, self._step = script, agenda, step
        self._turns: dict[int, list] = {}
        self._take = lambda _replies: None

    def attach(self, loop, take) -> None:
        self._take = take

    def begin(self, command, key) -> None:
        seed = sampling_seed(self._script.seed, self._step(), *key)
        opening, *turns = scripted_turns(self._script, seed)
        self._turns[command.episode] = turns
        self._answer(opening.tool_s, EnvironmentAnswer(episode=command.episode))

    def step(self, command) -> None:
        episode, turns = command.episode, self._turns[command.episode]
        assert command.left_sampled >= 0
        if command.cut:
            assert command.left_sampled == 0
            self._answer(turns[-1].tool_s, EnvironmentAnswer(episode=episode, over="length"))
            return
        turn = turns.pop(0)
        assert len(command.reply) == 4 * turn.tokens
        tokens = np.ones(turn.added, np.int32).tobytes()
        over = "" if turns else "stop"
        self._answer(turn.tool_s, EnvironmentAnswer(episode=episode, tokens=tokens, over=over))

    def _answer(self, seconds: float, answer: EnvironmentAnswer) -> None:
        self._agenda.after(seconds, lambda: self._answered(answer))

    def _answered(self, answer: EnvironmentAnswer) -> None:
        if answer.episode in self._turns:
            self._take([EpisodeReply(answer)])

    def close_episode(self, episode) -> None:
        self._turns.pop(episode, None)

    def said(self) -> list[str]:
        return []


def virtual_episodes(
    script: Script, agenda: Agenda, clock, step: Callable[[], int]
) -> Episodes | None:
    """The environments of a script, if it has any."""
    if not script.tools:
        return None
    episodes = Episodes(
        EnvironmentConfig(kind="tools", path=["tools.py:use"]),
        VirtualEnvironments(script, agenda, step),
        most=script.cap,
        total=_ENOUGH,
        context=2 * _ENOUGH,
        lockstep=False,
        clock=clock,
    )
    episodes.start(asyncio.new_event_loop())
    return episodes
