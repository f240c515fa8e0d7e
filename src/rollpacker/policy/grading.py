"""Limits of grading: timeouts, the judge's memory, and when a reward function is broken."""

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
        config: ``T = min(max(least_s, factor * anchor), most_s)``, in CPU seconds. ``most_s`` if
            not adaptive.
        at_once: a correct response counts when it is graded, as in the paper. Otherwise from the
            next step, so that rewards do not depend on the order of grading.
        cases: most test cases to remember. The least recently seen are forgotten.
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
        rules = self._config
        anchor = self._anchors.get(case)
        if anchor is None or not rules.adaptive:
            return rules.most_s
        return min(max(rules.least_s, rules.factor * anchor), rules.most_s)

    def observe(self, case: str, seconds: float, correct: bool) -> None:
        if not correct:
            return
        if self._at_once:
            self._raise(case, seconds)
        else:
            self._later[case] = max(seconds, self._later.get(case, 0.0))

    def advance(self) -> None:
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
    """The costs of one replica of the judge.

    Args:
        layers: its blocks, of ``layer_bytes`` each.
        fixed_bytes: embeddings, head and buffers, always resident.
        token_bytes: activations and KV of one token of a running sequence.
        token_seconds, copy_seconds: of one token in one block, and of a block's copy from the host.
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
    """The ``concurrency`` shortest waiting sequences run, and ``resident`` layers stay."""

    concurrency: int
    resident: int


class JudgeBudget:
    """Concurrency and resident layers of a judge replica in the memory of the rollout's devices
    (RollPacker, section 4.3).

    A pass takes as long as its compute or the copies of non-resident layers, whichever is longer.
    Starting from one sequence and one layer, it adds the item with the largest speed-up per byte,
    until compute hides copies or memory ends. The rest of the memory stays with the actor. The
    order does not depend on the memory, so more memory never means fewer layers or sequences.
    """

    def __init__(self, model: JudgeModel, most: int = 256) -> None:
        if model.layers < 1 or most < 1:
            raise ValueError(f"a judge needs layers >= 1 and most >= 1, got {model.layers}, {most}")
        self._model = model
        self._most = most

    def decide(self, waiting: Sequence[int], free_bytes: float) -> JudgePlan | None:
        """The plan for ``waiting`` lengths in tokens. None if nothing waits or fits."""
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
        """The last two layers cost no memory, as they use the place of the copies."""
        return self._model.layers if resident + 2 >= self._model.layers else resident

    def _copies(self, resident: int) -> float:
        return (self._model.layers - resident) * self._model.copy_seconds

    def _compute(self, tokens: int) -> float:
        return self._model.layers * tokens * self._model.token_seconds

    def _speed(self, resident: int, tokens: int) -> float:
        seconds = max(self._copies(resident), self._compute(tokens))
        return tokens / seconds if seconds > 0.0 else math.inf

    def _layer_first(self, resident: int, tokens: int, longer: int) -> bool:
        if longer == tokens:
            return True
        now = self._speed(resident, tokens)
        layer = self._speed(self._kept(resident + 1), tokens) - now
        sequence = self._speed(resident, longer) - now
        sequence_bytes = (longer - tokens) * self._model.token_bytes
        return layer * sequence_bytes >= sequence * self._model.layer_bytes


PROMPTS = 3
"""Prompts that must fail in the same way before the first answer, so that one bad row is not
enough."""
RESPONSES = 8  # responses that must fail before the first answer, if there are too few prompts
IN_A_ROW = 32
"""Responses that must fail in a row after an answer. With a timeout of 10 s and one process this
takes five to ten minutes, about as long as a service's restart."""


@dataclass(slots=True)
class _Record:
    """How each response failed since the last answer, and the failed prompts by that way."""

    answered: bool = False
    ways: dict[int, str] = field(default_factory=dict[int, str])
    prompts: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    last: str = ""


class RewardFaults:
    """Counts failures since a function's last answer, to tell a broken function from rare failures.
    ``patient`` functions can fail for the machine's faults, and are never given up at the first
    ones."""

    def __init__(self, functions: int, patient: Collection[int] = ()) -> None:
        self._records = [_Record(answered=index in patient) for index in range(functions)]

    def answered(self, function: int) -> None:
        record = self._records[function]
        record.answered = True
        if record.ways:
            record.ways, record.prompts = {}, {}

    def failed(self, function: int, response: int, prompt: str, way: str) -> bool:
        """A call for one response failed. Returns whether the function is broken. Repeated calls
        for a response count once. ``way`` is equal for faults of one kind."""
        record = self._records[function]
        record.ways[response] = way
        record.prompts.setdefault(way, set()).add(prompt)
        record.last = way
        if record.answered:
            return len(record.ways) >= IN_A_ROW
        return len(record.prompts[way]) >= PROMPTS or len(record.ways) >= RESPONSES

    def counts(self, function: int) -> tuple[int, int]:
        """Responses that failed like the last one, and all that failed since the last answer."""
        record = self._records[function]
        return sum(way == record.last for way in record.ways.values()), len(record.ways)

    def suspects(self) -> list[int]:
        return [
            index
            for index, record in enumerate(self._records)
            if record.ways and (not record.answered or len(record.ways) >= RESPONSES)
        ]

    def tried(self, function: int, prompt: str) -> bool:
        return any(prompt in prompts for prompts in self._records[function].prompts.values())


class EmptySteps:
    """Decides when a run with empty steps stops, under dynamic sampling."""

    def __init__(self, config: DynamicSamplingConfig) -> None:
        self._most = config.max_empty_steps if config.enabled else 0
        self.in_a_row = 0

    def too_many(self, groups: int) -> bool:
        """A step has ended with this number of groups. Returns whether the run must end."""
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
            "rewards differ: check 'rewards', use easier or harder problems, or raise "
            "rollout.dynamic_sampling.max_empty_steps (0: never stop)"
        )
