"""How long grading may take, what the judge may use, when a reward function is broken.

Nothing here grades.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollpacker.config import CodeTimeoutConfig, DynamicSamplingConfig


class AdaptiveTimeouts:
    """A timeout for each test case, from the correct responses to it so far (RollPacker, section
    4.3).

    Args:
        config: ``T = min(max(least_s, factor * anchor), most_s)``, in CPU seconds; not adaptive
            ones are ``most_s``.
        at_once: a correct response counts from when it is graded, as in the paper. Otherwise from
            the next step, so that rewards do not depend on the order of grading.
        cases: test cases remembered; the least recently seen are forgotten.
    """

    def __init__(
        self, config: CodeTimeoutConfig, *, at_once: bool = True, cases: int = 1_000_000
    ) -> None:
        self._config = config
        self._at_once = at_once
        self._cases = cases
        self._anchors: OrderedDict[str, float] = OrderedDict()
        self._later: dict[str, float] = {}

    def timeout(self, case: str) -> float:
        """Seconds that a response may take on this test case."""
        rules = self._config
        anchor = self._anchors.get(case)
        if anchor is None or not rules.adaptive:
            return rules.most_s
        return min(max(rules.least_s, rules.factor * anchor), rules.most_s)

    def observe(self, case: str, seconds: float, correct: bool) -> None:
        """Take the time of one response on one test case; only correct ones count."""
        if not correct:
            return
        if self._at_once:
            self._raise(case, seconds)
        else:
            self._later[case] = max(seconds, self._later.get(case, 0.0))

    def advance(self) -> None:
        """A step is over: what waited for its end counts from now on."""
        for case in sorted(self._later):
            self._raise(case, self._later[case])
        self._later.clear()

    def _raise(self, case: str, seconds: float) -> None:
        self._anchors[case] = max(seconds, self._anchors.get(case, 0.0))
        self._anchors.move_to_end(case)
        if len(self._anchors) > self._cases:
            self._anchors.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        return {"anchors": list(self._anchors.items()), "later": dict(self._later)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._anchors = OrderedDict((case, seconds) for case, seconds in state["anchors"])
        self._later = dict(state["later"])


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModel:
    """What one replica of the judge needs.

    Args:
        layers: its blocks, of ``layer_bytes`` each.
        fixed_bytes: embeddings, head and buffers, always resident.
        token_bytes: activations and KV of one token of a running sequence.
        token_seconds: compute of one token in one block.
        copy_seconds: copy of one block from host memory.
    """

    layers: int
    layer_bytes: int
    fixed_bytes: int
    token_bytes: float
    token_seconds: float
    copy_seconds: float

    def bytes_needed(self, resident: int, tokens: int) -> float:
        """Peak device memory: two more blocks than are resident, one in use and one on its way."""
        held = min(self.layers, resident + 2)
        return self.fixed_bytes + held * self.layer_bytes + tokens * self.token_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """The ``concurrency`` shortest waiting sequences run, ``resident`` layers stay."""

    concurrency: int
    resident: int


class JudgeBudget:
    """Concurrency and resident layers of a judge replica, with the memory of the rollout's devices
    (RollPacker, section 4.3).

    A pass takes as long as its compute or as the copies of the layers that are not resident,
    whichever is longer. Starting from one sequence and one layer, whatever speeds the judge up most
    per byte is added next, until copies hide behind compute (the rest of the memory stays with the
    actor) or memory ends. That order does not depend on the memory, so more memory never means
    fewer layers or sequences.
    """

    def __init__(self, model: JudgeModel, most: int = 256) -> None:
        if model.layers < 1 or most < 1:
            raise ValueError(f"a judge needs layers >= 1 and most >= 1, got {model.layers}, {most}")
        self._model = model
        self._most = most

    def decide(self, waiting: Sequence[int], free_bytes: float) -> JudgePlan | None:
        """The plan for ``waiting`` lengths in tokens; None when nothing waits or fits."""
        lengths = sorted(waiting)[: self._most]
        if not lengths or self._model.bytes_needed(1, lengths[0]) > free_bytes:
            return None
        count, resident, tokens = 1, self._kept(1), lengths[0]
        while self._copies(resident) > self._compute(tokens):
            longer = tokens + lengths[count] if count < len(lengths) else tokens
            if self._layer_first(resident, tokens, longer):
                step = (count, self._kept(resident + 1), tokens)
            else:
                step = (count + 1, resident, longer)
            if self._model.bytes_needed(step[1], step[2]) > free_bytes:
                break
            count, resident, tokens = step
        return JudgePlan(concurrency=count, resident=resident)

    def _kept(self, resident: int) -> int:
        """The last two layers cost no memory: their place is the copies' place."""
        return self._model.layers if resident + 2 >= self._model.layers else resident

    def _copies(self, resident: int) -> float:
        return (self._model.layers - resident) * self._model.copy_seconds

    def _compute(self, tokens: int) -> float:
        return self._model.layers * tokens * self._model.token_seconds

    def _speed(self, resident: int, tokens: int) -> float:
        seconds = max(self._copies(resident), self._compute(tokens))
        return tokens / seconds if seconds > 0.0 else math.inf

    def _layer_first(self, resident: int, tokens: int, longer: int) -> bool:
        """Whether a layer is the better use of the next bytes than a sequence."""
        if longer == tokens:
            return True
        now = self._speed(resident, tokens)
        layer = self._speed(self._kept(resident + 1), tokens) - now
        sequence = self._speed(resident, longer) - now
        sequence_bytes = (longer - tokens) * self._model.token_bytes
        return layer * sequence_bytes >= sequence * self._model.layer_bytes


PROMPTS = 3
"""Prompts that fail in the same way before the first answer: one bad row cannot be all of them."""
RESPONSES = 8
"""Responses that fail before the first answer, where there are no so many prompts to try."""
IN_A_ROW = 32
"""Responses that fail in a row after an answer. With a timeout of 10 s and one process this takes
some five to ten minutes, about as long as a service takes that is started again."""


@dataclass(slots=True)
class _Record:
    answered: bool = False
    ways: dict[int, str] = field(default_factory=dict[int, str])
    """How each response failed since the last answer."""
    prompts: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """The prompts of those responses, by how they failed."""
    last: str = ""


class RewardFaults:
    """Counts what failed since a function's last answer: whether it is broken, rather than unable
    to grade a response now and then. ``patient``: functions that fail for the machine's faults,
    too, and are never given up at the first ones."""

    def __init__(self, functions: int, patient: Collection[int] = ()) -> None:
        self._records = [_Record(answered=index in patient) for index in range(functions)]

    def answered(self, function: int) -> None:
        """A call was answered: what failed before says nothing of the function."""
        record = self._records[function]
        record.answered = True
        if record.ways:
            record.ways, record.prompts = {}, {}

    def failed(self, function: int, response: int, prompt: str, way: str) -> bool:
        """A call for one response failed; whether the function is broken. Repeated calls for a
        response count once; ``way`` is equal for faults of one kind."""
        record = self._records[function]
        record.ways[response] = way
        record.prompts.setdefault(way, set()).add(prompt)
        record.last = way
        if record.answered:
            return len(record.ways) >= IN_A_ROW
        return len(record.prompts[way]) >= PROMPTS or len(record.ways) >= RESPONSES

    def counts(self, function: int) -> tuple[int, int]:
        """Responses that failed in the way of the last one, of all since the last answer."""
        record = self._records[function]
        return sum(way == record.last for way in record.ways.values()), len(record.ways)

    def suspects(self) -> list[int]:
        """Functions whose last calls failed, and that have not answered or not for long."""
        return [
            index
            for index, record in enumerate(self._records)
            if record.ways and (not record.answered or len(record.ways) >= RESPONSES)
        ]

    def tried(self, function: int, prompt: str) -> bool:
        return any(prompt in prompts for prompts in self._records[function].prompts.values())


class EmptySteps:
    """When a run stops whose steps dynamic sampling leaves empty."""

    def __init__(self, config: DynamicSamplingConfig) -> None:
        self._most = config.max_empty_steps if config.enabled else 0
        self.in_a_row = 0

    def too_many(self, groups: int) -> bool:
        """A step has ended with so many groups; whether the run is to end."""
        self.in_a_row = 0 if groups else self.in_a_row + 1
        return 0 < self._most <= self.in_a_row

    def state_dict(self) -> dict[str, int]:
        return {"in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.in_a_row = state["in_a_row"]

    def __str__(self) -> str:
        which = f"{self.in_a_row} steps in a row" if self.in_a_row > 1 else "a step"
        return (
            f"dynamic sampling has left {which} without a group to train on, since no prompt's "
            "rewards differ: check 'rewards', take problems of another "
            "difficulty, or raise rollout.dynamic_sampling.max_empty_steps (0: never stop)"
        )
