"""Chooses the sequences of a step and their KV blocks. Nothing here touches weights."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rollpacker.core.types import NO_DRAFTS, AttemptId, Drafted, PromptId
from rollpacker.engine.base import Floats, Ints, Request, StopWatcher, uniforms
from rollpacker.engine.drafts import LONGEST_DRAFT, among


class Blocks:
    """Free list of KV blocks. A block is free if nothing refers to it. A parked reference can be
    given up at any time. ``spare`` counts the blocks that have only those."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.spare = 0
        self._free = list(range(count - 1, -1, -1))
        self._references = [0] * count
        self._parked = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free)
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            assert not self._only_parked(block)
            self._references[block] += 1
        return list(blocks)

    def drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
            else:
                self.spare += self._only_parked(block)

    def park(self, blocks: list[int]) -> None:
        for block in blocks:
            assert not self._only_parked(block)
            self._parked[block] += 1
            self.spare += self._only_parked(block)

    def unpark(self, blocks: list[int]) -> None:
        for block in blocks:
            self.spare -= self._only_parked(block)
            self._parked[block] -= 1

    def idle(self, blocks: list[int]) -> int:
        return sum(map(self._only_parked, blocks))

    def _only_parked(self, block: int) -> bool:
        return self._references[block] == self._parked[block]


@dataclass(slots=True, eq=False)
class Prefix:
    """A group's prompt, and its KV while that is cached.

    Attributes:
        blocks: full blocks before the prompt's last token, shared while ``cached``.
        tail: copy of the block of the prompt's last token. Each member copies it.
        hidden: last hidden state (1, hidden) of the prompt, in the runner's own array.
    """

    prompt: Ints
    members: int = 0
    cached: bool = False
    blocks: list[int] = field(default_factory=list[int])
    tail: int | None = None
    hidden: Any = None

    def forget(self, blocks: Blocks) -> None:
        blocks.drop(self.blocks)
        if self.tail is not None:
            blocks.drop([self.tail])
        self.blocks, self.tail, self.hidden, self.cached = [], None, None, False


@dataclass(frozen=True, slots=True, eq=False)
class ParkedTurn:
    """A finished turn: its attempt's prompt (P,), the response up to its end (T,), and its blocks.
    The last of at least one response token has no KV yet, and no block."""

    prompt: Ints
    tokens: Ints
    blocks: list[int]

    @property
    def known(self) -> int:
        """Tokens that have KV, from the first on."""
        return len(self.prompt) + len(self.tokens) - 1

    def begins(self, request: Request) -> bool:
        begin = request.generated[: len(self.tokens)]
        same = np.array_equal(self.prompt, request.prompt)
        return same and np.array_equal(self.tokens, begin)


class Parked:
    """Finished turns by attempt. Their KV is kept until they continue, or until blocks are needed.
    Turns whose attempts have not come back go first, the oldest before others. Then go those whose
    requests wait, the last in the queue first, as it runs last."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._away: dict[AttemptId, ParkedTurn] = {}
        self._back: dict[AttemptId, ParkedTurn] = {}

    def put(self, attempt: AttemptId, turn: ParkedTurn) -> None:
        assert attempt not in self._away
        assert attempt not in self._back
        self._blocks.park(turn.blocks)
        self._away[attempt] = turn

    def come_back(self, request: Request) -> None:
        """A request waits: keep its attempt's turn, or drop the turn if its text differs."""
        turn = self._away.get(request.attempt)
        if turn is None:
            return
        if turn.begins(request):
            self._back[request.attempt] = self._away.pop(request.attempt)
        else:
            self.drop(request.attempt)

    def find(self, attempt: AttemptId) -> ParkedTurn | None:
        return self._back.get(attempt)

    def take(self, attempt: AttemptId) -> ParkedTurn:
        turn = self._back.pop(attempt)
        self._blocks.unpark(turn.blocks)
        return turn

    def evict(self, but: AttemptId) -> bool:
        """Drop the next turn, except that of one attempt. Returns whether there was one."""
        back = (attempt for attempt in reversed(self._back) if attempt != but)
        first = next(chain(self._away, back), None)
        if first is not None:
            self.drop(first)
        return first is not None

    def drop(self, attempt: AttemptId) -> None:
        turn = self._away.pop(attempt, None) or self._back.pop(attempt, None)
        if turn is not None:
            self._blocks.unpark(turn.blocks)
            self._blocks.drop(turn.blocks)

    def clear(self) -> None:
        for attempt in [*self._away, *self._back]:
            self.drop(attempt)


CHUNK = LONGEST_DRAFT + 1  # uniforms that are made at a time


class Slots:
    """State of the running sequences, one row each, so that the bookkeeping of a step is
    vectorised.

    Attributes:
        tables: (slots, blocks of the context) int32 block of each 16 tokens.
        token: last token, not yet run.
        texts: (slots, context) the prompt followed by the response.
        stops: (slots, S) token ids that end it, padded with -1.
        room: tokens that its blocks hold.
        ticket: a new number for each sequence that enters a slot.
        drafts: (slots, 3) verifications, drafted and accepted tokens (``Drafted``).
    """

    def __init__(self, count: int, context: int, block_size: int) -> None:
        self.tables = np.zeros((count, -(-context // block_size)), np.int32)
        self.token = np.zeros(count, np.int32)
        self.prompt = np.zeros(count, np.int32)
        self.count = np.zeros(count, np.int32)
        self.limit = np.zeros(count, np.int32)
        self.texts = np.zeros((count, context), np.int32)
        self.logprobs = np.zeros((count, context), np.float32)
        self.stops = np.full((count, 4), -1, np.int32)
        self.temperature = np.zeros(count, np.float32)
        self.top_k = np.zeros(count, np.int32)
        self.top_p = np.ones(count, np.float32)
        self.room = np.zeros(count, np.int32)
        self.ticket = np.zeros(count, np.int64)
        self.drafts = np.zeros((count, len(NO_DRAFTS)), np.int64)
        self._seed = [0] * count
        self._uniforms = np.zeros((count, 2 * CHUNK))

    def fill(
        self, slot: int, request: Request, tokens: Ints, logprobs: Floats, drafts: Drafted
    ) -> None:
        params = request.params
        prompt, done = len(request.prompt), len(tokens)
        self.prompt[slot], self.count[slot] = prompt, done
        self.limit[slot] = params.max_tokens
        self.texts[slot, :prompt] = request.prompt
        self.texts[slot, prompt : prompt + done] = tokens
        self.logprobs[slot, :done] = logprobs
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.ticket[slot] = self.ticket.max() + 1
        self.drafts[slot] = drafts
        stops = () if params.ignore_stop else params.stop_token_ids
        if len(stops) > self.stops.shape[1]:
            more = len(stops) - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, more)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(stops)] = stops
        self._seed[slot] = request.seed
        start = done - done % CHUNK
        there = np.arange(start, start + 2 * CHUNK) % (2 * CHUNK)
        self._uniforms[slot, there] = uniforms(request.seed, start, 2 * CHUNK)

    def draw_uniforms(self, slots: Ints, ahead: Ints | int = 0) -> NDArray[np.float64]:
        """The uniform of each slot's next token, or of one ``ahead`` of it, below ``CHUNK``."""
        return self._uniforms[slots, (self.count[slots] + ahead) % (2 * CHUNK)]

    def append(self, slots: Ints, tokens: Ints, logprobs: Floats) -> tuple[Ints, Ints]:
        """Add a token to each slot. Returns the slots that sampled a stop token, and those at their
        limit. A slot with both is only among the first."""
        none = np.zeros(len(slots), np.int32)
        return self.settle(slots, none[:, None], none, tokens, logprobs)[1:]

    def settle(
        self, slots: Ints, drafts: Ints, lengths: Ints, tokens: Ints, logprobs: Floats
    ) -> tuple[Ints, Ints, Ints]:
        """Keep each slot's samples up to the first that differs from its draft or is a stop token.

        ``drafts`` is (b, k), of which the first ``lengths`` (b,) tokens are a slot's draft.
        ``tokens`` and ``logprobs`` (rows,) have one more for each slot than its draft. Returns the
        numbers of accepted tokens (b,), and slots as ``append`` does.
        """
        right, ends = np.empty((2, len(slots)), np.int32)
        where = (slots, self.prompt, self.count, self.limit, self.token)
        theirs = (self.stops, self.texts, self.logprobs, self.drafts)
        over, chunks = _settle(where, drafts, lengths, tokens, logprobs, theirs, right, ends)
        if chunks:
            crossed = self.count[slots] % CHUNK <= lengths
            self._draw_on(slots[crossed & (self.count[slots] >= CHUNK)])
        if not over:
            return right, _NOBODY, _NOBODY
        return right, slots[ends == _STOPPED], slots[ends == _FULL]

    def _draw_on(self, slots: Ints) -> None:
        for slot in slots:
            start = (int(self.count[slot]) // CHUNK + 1) * CHUNK
            place = start % (2 * CHUNK)
            self._uniforms[slot, place : place + CHUNK] = uniforms(self._seed[slot], start, CHUNK)

    def text(self, slot: int) -> Ints:
        return self.texts[slot, : self.prompt[slot] + self.count[slot]]

    def response(self, slot: int) -> tuple[Ints, Floats]:
        prompt, count = self.prompt[slot], self.count[slot]
        return self.texts[slot, prompt : prompt + count].copy(), self.logprobs[slot, :count].copy()


_NOBODY = np.zeros(0, np.int32)
_STOPPED, _FULL = 1, 2


@njit(cache=True, nogil=True)
def _settle(
    where: Any,
    drafts: Any,
    lengths: Any,
    tokens: Any,
    logprobs: Any,
    theirs: Any,
    right: Any,
    ends: Any,
) -> tuple[int, int]:
    """``Slots.settle`` without the uniforms. Returns how many ended, and how many entered a
    chunk."""
    slots, prompts, counts, limits, last = where
    stops, texts, kept, stats = theirs
    row = over = chunks = 0
    for i in range(len(slots)):
        slot = slots[i]
        before = counts[slot] // CHUNK
        right[i] = ends[i] = 0
        for j in range(lengths[i] + 1):
            token, count = tokens[row + j], counts[slot]
            texts[slot, prompts[slot] + count] = token
            kept[slot, count] = logprobs[row + j]
            counts[slot] = count + 1
            agrees = j < lengths[i] and token == drafts[i, j]
            right[i] += agrees
            if among(stops[slot], token):
                ends[i] = _STOPPED
            if ends[i] or not agrees:
                break
        last[slot] = texts[slot, prompts[slot] + counts[slot] - 1]
        if not ends[i] and counts[slot] >= limits[slot]:
            ends[i] = _FULL
        over += ends[i] > 0
        chunks += counts[slot] // CHUNK > before
        stats[slot, 0] += lengths[i] > 0
        stats[slot, 1] += lengths[i]
        stats[slot, 2] += right[i]
        row += lengths[i] + 1
    return over, chunks


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
    """The rows, from ``start`` on, that this step runs for a joining sequence. One that ``leads``
    shares its prompt's KV with its group. One that ``follows`` uses that and runs nothing."""

    sequence: Held
    start: int
    leads: bool = False
    follows: bool = False


class SequenceScheduler:
    """Chooses the sequences of a step and their KV blocks: first come, first served.

    If a running sequence finds no free block, it takes that of a finished turn, then that of a
    cached prefix. Otherwise the latest admitted sequence is preempted and recomputed later. A
    waiting sequence takes blocks of finished turns only if it then fits.

    Attributes:
        held: all that is neither finished nor aborted.
        running: sequences by slot, in order of admission.
        cached: tokens not run again because their last turn was parked.
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
        return len(self._waiting)

    def check(self, request: Request) -> None:
        if request.attempt in self.held:
            raise ValueError(f"attempt {request.attempt} is already held")
        prefix = self._prefixes.get(request.group)
        if prefix is not None and not np.array_equal(prefix.prompt, request.prompt):
            raise ValueError(f"group {request.group!r} has two different prompts")

    def add(self, request: Request, watcher: StopWatcher | None) -> None:
        prefix = self._prefixes.get(request.group)
        if prefix is None:
            prefix = self._prefixes[request.group] = Prefix(request.prompt)
        prefix.members += 1
        sequence = Held(request, prefix, request.generated, request.logprobs, watcher)
        self.held[request.attempt] = sequence
        self._waiting.append(sequence)
        self.parked.come_back(request)

    def schedule(self) -> tuple[Ints, list[Joining]]:
        return self._grow(), self._admit()

    def remove(self, sequence: Held, *, ended: bool = False) -> tuple[Ints, Floats]:
        """Let go of a sequence, and return its response tokens and logprobs. If it has ``ended``
        and another turn may follow, its KV is parked."""
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
        """The tokens beyond the next one for which each slot has blocks, at most those wanted.
        While nothing waits, it takes free blocks that no other sequence needs soon."""
        s, size = self._slots, self._size
        ends = s.prompt[slots] + s.count[slots]
        for i in np.flatnonzero(ends + wanted > s.room[slots]):
            missing = -(-int(ends[i] + wanted[i] - s.room[slots[i]]) // size)
            spare = 0 if self._waiting else self._blocks.free - len(self.running)
            self._give(self.running[int(slots[i])], self._blocks.take(max(0, min(missing, spare))))
        return np.minimum(wanted, s.room[slots] - ends)

    def _grow(self) -> Ints:
        s, slots = self._slots, self._active
        for slot in slots[s.prompt[slots] + s.count[slots] > s.room[slots]]:
            sequence = self.running.get(int(slot))
            if sequence is not None and self._make_room(sequence):
                self._give(sequence, self._blocks.take(1))
        return self._active

    def _make_room(self, sequence: Held) -> bool:
        while not self._blocks.free:
            if not (self.parked.evict(sequence.request.attempt) or self._evict()):
                self._preempt(next(reversed(self.running.values())))
        return sequence.slot >= 0

    def _evict(self) -> bool:
        for prefix in self._prefixes.values():
            if prefix.cached:
                prefix.forget(self._blocks)
                return True
        return False

    def _preempt(self, sequence: Held) -> None:
        self._save(sequence)
        self._leave(sequence)
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    def _save(self, sequence: Held) -> None:
        sequence.tokens, sequence.logprobs = self._slots.response(sequence.slot)
        sequence.drafts = Drafted(*self._slots.drafts[sequence.slot].tolist())

    def _park(self, sequence: Held) -> None:
        prompt, tokens = sequence.request.prompt, sequence.tokens
        kept = -(-(len(prompt) + len(tokens) - 1) // self._size)
        self.parked.put(
            sequence.request.attempt, ParkedTurn(prompt, tokens, sequence.blocks[:kept])
        )
        sequence.blocks = sequence.blocks[kept:]

    def _leave(self, sequence: Held) -> None:
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
        """Free ``missing`` blocks by evicting finished turns if that suffices, without the ``own``
        blocks."""
        # Each running sequence may want a block soon: admitting into those would only preempt.
        spare = self._blocks.spare - self._blocks.idle(own) - len(self.running)
        if missing > self._blocks.free + spare:
            return False
        while missing > self._blocks.free:
            self.parked.evict(attempt)
        return True

    def _found(self, sequence: Held, turn: ParkedTurn | None) -> list[int]:
        if turn is None:
            return self._blocks.share(sequence.prefix.blocks)
        self.cached += turn.known
        return self.parked.take(sequence.request.attempt).blocks

    def _cache(self, sequence: Held, fresh: bool) -> None:
        prefix = sequence.prefix
        full = (len(prefix.prompt) - 1) // self._size
        prefix.cached = True
        prefix.blocks = self._blocks.share(sequence.blocks[:full])
        if fresh and self._blocks.free:
            prefix.tail = self._blocks.take(1)[0]
