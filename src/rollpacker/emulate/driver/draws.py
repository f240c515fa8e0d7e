"""Which prompt of the workload each prompt of an emulated run stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollpacker.core.types import Prompt, PromptId
from rollpacker.emulate.messages import Draw
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.sim.workload.workload import interleaved


class WorkloadDraws:
    """Which prompt of the workload each prompt stands for: draws are counted as a simulation
    does."""

    def __init__(self) -> None:
        self._drawn = 0
        self._step = 0
        self._known: dict[PromptId, tuple[Draw, int]] = {}

    def add(self, drawn: Sequence[Prompt]) -> None:
        """These were drawn together."""
        counts: dict[str, int] = {}
        for prompt in drawn:
            counts[prompt.domain] = counts.get(prompt.domain, 0) + 1
        numbers: dict[str, list[int]] = {domain: [] for domain in counts}
        for domain in interleaved(counts):
            numbers[domain].append(self._drawn)
            self._drawn += 1
        for prompt in drawn:
            number = numbers[prompt.domain].pop(0)
            self._known[prompt.id] = Draw(number, -1, prompt.domain), -1

    def begin(self, step: int) -> None:
        """What is sampled from now on is of this step."""
        self._step = step

    def of(self, prompt: PromptId) -> Draw:
        """Of a prompt that is sampled now."""
        draw, step = self._known[prompt]
        if step != self._step:
            draw = draw._replace(visits=draw.visits + 1)
            self._known[prompt] = draw, self._step
        return draw


class Counted(Problems):
    """Problems whose draws are counted."""

    def __init__(self, problems: Problems, draws: WorkloadDraws) -> None:
        self.rows, self.tokens, self.source = problems.rows, problems.tokens, problems.source
        self._draws = draws

    def draw(self, counts: Mapping[str, int]) -> tuple[Prompt, ...]:
        """The next fresh prompts."""
        drawn = super().draw(counts)
        self._draws.add(drawn)
        return drawn
