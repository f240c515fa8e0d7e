"""Which sequences run in a step and which KV blocks they have: decided here, run by the engine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from rollpacker.core.types import NO_DRAFTS, AttemptId, Drafted, PromptId
from rollpacker.engine.base import Floats, Ints, Request
from rollpacker.engine.mini.scheduling.blocks import Blocks, Prefix
from rollpacker.engine.mini.scheduling.parked import Parked, ParkedTurn
from rollpacker.engine.mini.scheduling.slots import Slots
from rollpacker.engine.stops import StopWatcher


@dataclass(slots=True, eq=False)
class Held:
    """A request that the engine holds and, while it waits, its response so far."""

    request: Request
    prefix: Prefix
    tokens: Ints
    logprobs: Floats
    watcher: StopWatcher | None = None
    slot: int = -1
    blocks: list[int] = field(default_factory=list[int])
    drafts: Drafted = NO_DRAFTS


@dataclass(slots=True, eq=False)
class Joining:
    """What this step runs for a sequence that joins: rows from ``start``, or nothing.

    One that ``leads`` leaves its prompt to its group; one that ``follows`` finds it there.
    """

    sequence: Held
    start: int
    leads: bool = False
    follows: bool = False


class SequenceScheduler:
    """First come, first served, as far as slots and blocks go.

    A running sequence that finds no block for its next token takes one of a turn that is over, then
    that of a cached prefix, which serves many; else the latest admitted sequence is thrown out, and
    recomputed when there is room again. Waiting sequences are admitted in the place of turns that
    are over too, but only where that makes them fit.

    Attributes:
        held: everything that is neither finished nor aborted.
        running: sequences by slot, in order of admission.
        parked: turns that are over, of attempts that may go on.
        preemptions: sequences thrown out, since the beginning.
        cached: tokens of requests that did not have to be run, since their last turn was parked.
    """

    def __init__(self, slots: Slots, blocks: Blocks, block_size: int) -> None:
        self._slots = slots
        self._blocks = blocks
        self._size = block_size
        self._waiting: deque[Held] = deque()
        self._free_slots = list(range(len(slots.tables) - 1, -1, -1))
        self._active = np.zeros(0, np.int32)
        self._prefixes: dict[PromptId, Prefix] = {}
        self.held: dict[AttemptId, Held] = {}
        self.running: dict[int, Held] = {}
        self.parked = Parked(blocks)
        self.preemptions = self.cached = 0

    @property
    def waiting(self) -> int:
        """Sequences not admitted yet, preempted ones included."""
        return len(self._waiting)

    def check(self, request: Request) -> None:
        """Raise ``ValueError`` on an id that is held or a group of another prompt."""
        if request.attempt in self.held:
            raise ValueError(f"attempt {request.attempt} is already held")
        prefix = self._prefixes.get(request.group)
        if prefix is not None and not np.array_equal(prefix.prompt, request.prompt):
            raise ValueError(f"group {request.group!r} has two different prompts")

    def add(self, request: Request, watcher: StopWatcher | None) -> None:
        """Queue a request."""
        prefix = self._prefixes.get(request.group)
        if prefix is None:
            prefix = self._prefixes[request.group] = Prefix(request.prompt)
        prefix.members += 1
        sequence = Held(request, prefix, request.generated, request.logprobs, watcher)
        self.held[request.attempt] = sequence
        self._waiting.append(sequence)
        self.parked.come_back(request)

    def schedule(self) -> tuple[Ints, list[Joining]]:
        """A step: the slots that decode a token, given room first, and who joins."""
        return self._grow(), self._admit()

    def remove(self, sequence: Held, *, ended: bool = False) -> tuple[Ints, Floats]:
        """Let go of a sequence; its response tokens and logprobs.

        One that has ``ended`` is parked where another turn may follow.
        """
        if sequence.slot >= 0:
            self._save(sequence)
            if ended and sequence.request.stays:
                self._park(sequence)
            self._leave(sequence)
        else:
            self._waiting.remove(sequence)
        request, prefix = sequence.request, sequence.prefix
        del self.held[request.attempt]
        prefix.members -= 1
        if not prefix.members:
            prefix.forget(self._blocks)
            del self._prefixes[request.group]
        return sequence.tokens, sequence.logprobs

    def reach(self, slots: Ints, wanted: Ints) -> Ints:
        """How many tokens beyond the next one each slot has blocks for, at most those wanted.

        Takes blocks that are free and that no other will need soon, while nothing waits.
        """
        s, size = self._slots, self._size
        ends = s.prompt[slots] + s.count[slots]
        for i in np.flatnonzero(ends + wanted > s.room[slots]):
            missing = -(-int(ends[i] + wanted[i] - s.room[slots[i]]) // size)
            spare = 0 if self._waiting else self._blocks.free - len(self.running)
            self._give(self.running[int(slots[i])], self._blocks.take(max(0, min(missing, spare))))
        return np.minimum(wanted, s.room[slots] - ends)

    def _grow(self) -> Ints:
        """Give every running sequence a block for its next token; returns their slots."""
        s, slots = self._slots, self._active
        for slot in slots[s.prompt[slots] + s.count[slots] > s.room[slots]]:
            sequence = self.running.get(int(slot))
            if sequence is not None and self._make_room(sequence):
                self._give(sequence, self._blocks.take(1))
        return self._active

    def _make_room(self, sequence: Held) -> bool:
        """Free a block, preempting the latest admitted; whether ``sequence`` still runs."""
        while not self._blocks.free:
            if not (self.parked.evict(sequence.request.attempt) or self._evict()):
                self._preempt(next(reversed(self.running.values())))
        return sequence.slot >= 0

    def _evict(self) -> bool:
        """Forget one cached prefix; whether there was one."""
        for prefix in self._prefixes.values():
            if prefix.cached:
                prefix.forget(self._blocks)
                return True
        return False

    def _preempt(self, sequence: Held) -> None:
        """Throw a sequence out; it is recomputed when there is room again."""
        self._save(sequence)
        self._leave(sequence)
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _save(self, sequence: Held) -> None:
        """What a slot has made of its sequence."""
        sequence.tokens, sequence.logprobs = self._slots.response(sequence.slot)
        sequence.drafts = Drafted(*self._slots.drafts[sequence.slot].tolist())

    def _park(self, sequence: Held) -> None:
        """Keep the blocks of what has KV; the last token has none yet."""
        prompt, tokens = sequence.request.prompt, sequence.tokens
        kept = -(-(len(prompt) + len(tokens) - 1) // self._size)
        self.parked.put(
            sequence.request.attempt, ParkedTurn(prompt, tokens, sequence.blocks[:kept])
        )
        sequence.blocks = sequence.blocks[kept:]

    def _leave(self, sequence: Held) -> None:
        """Free a running sequence's slot and blocks."""
        del self.running[sequence.slot]
        self._free_slots.append(sequence.slot)
        self._blocks.drop(sequence.blocks)
        sequence.slot, sequence.blocks = -1, []
        self._active = np.fromiter(self.running, np.int32, len(self.running))

    def _give(self, sequence: Held, blocks: list[int]) -> None:
        held = len(sequence.blocks)
        sequence.blocks += blocks
        self._slots.tables[sequence.slot, held : len(sequence.blocks)] = blocks
        self._slots.room[sequence.slot] = len(sequence.blocks) * self._size

    def _admit(self) -> list[Joining]:
        """Move waiting sequences, in order, into free slots while their blocks fit."""
        admitted: list[Joining] = []
        while self._waiting and self._free_slots:
            admission = self._place(self._waiting[0])
            if admission is None:
                if self.running or not self._evict():
                    break
                continue
            self._waiting.popleft()
            admitted.append(admission)
        if admitted:
            self._active = np.fromiter(self.running, np.int32, len(self.running))
        return admitted

    def _place(self, sequence: Held) -> Joining | None:
        """Give a waiting sequence a slot and its blocks; None when they do not fit."""
        prefix, size = sequence.prefix, self._size
        length = len(prefix.prompt) + len(sequence.tokens)
        fresh = len(sequence.tokens) == 0
        turn = self.parked.find(sequence.request.attempt)
        own = prefix.blocks if turn is None else turn.blocks
        missing = -(-length // size) - len(own)
        if not self._clear(missing, sequence.request.attempt, own):
            return None
        slot = sequence.slot = self._free_slots.pop()
        self.running[slot] = sequence
        start = len(own) * size if turn is None else turn.known
        self._give(sequence, self._found(sequence, turn))
        self._give(sequence, self._blocks.take(missing))
        self._slots.fill(
            slot, sequence.request, sequence.tokens, sequence.logprobs, sequence.drafts
        )
        if fresh and prefix.tail is not None:
            return Joining(sequence, length, follows=True)
        leads = not prefix.cached and prefix.members > 1
        if leads:
            self._cache(sequence, fresh)
        return Joining(sequence, start, leads=leads and fresh)

    def _clear(self, missing: int, attempt: AttemptId, own: list[int]) -> bool:
        """Free as many blocks, in the place of turns that are over, if these will do; an attempt's
        ``own`` blocks stay."""
        # Each running sequence may want a block soon: admitting into those would only preempt.
        spare = self._blocks.spare - self._blocks.idle(own) - len(self.running)
        if missing > self._blocks.free + spare:
            return False
        while missing > self._blocks.free:
            self.parked.evict(attempt)
        return True

    def _found(self, sequence: Held, turn: ParkedTurn | None) -> list[int]:
        """The blocks that a sequence begins with: those of its last turn, or of its prefix."""
        if turn is None:
            return self._blocks.share(sequence.prefix.blocks)
        self.cached += turn.known
        return self.parked.take(sequence.request.attempt).blocks

    def _cache(self, sequence: Held, fresh: bool) -> None:
        """Let the group share this sequence's prompt blocks, and a copy of their tail."""
        prefix = sequence.prefix
        full = (len(prefix.prompt) - 1) // self._size
        prefix.cached = True
        prefix.blocks = self._blocks.share(sequence.blocks[:full])
        if fresh and self._blocks.free:
            prefix.tail = self._blocks.take(1)[0]
