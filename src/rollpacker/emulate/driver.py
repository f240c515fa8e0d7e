"""The driver's side of emulated devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.core.types import Prompt, PromptId
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.messages import Draw, Forced, Lateness, Punctual
from rollpacker.emulate.reward import BASE
from rollpacker.emulate.worker import StartEmulated
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.cluster.nodes import Start
from rollpacker.runtime.messages import messages as msg
from rollpacker.sim.workload.workload import interleaved

HONEST = 0.6
"""The largest driver utilisation at which the driver keeps up with the emulated devices."""
PUNCTUAL = 0.02
"""The largest valid lateness (99% quantile) of emulated actions, as a share of a rollout."""


class WorkloadDraws:
    """Maps each prompt to a prompt of the workload. It counts draws as a simulation does."""

    def __init__(self) -> None:
        self._drawn = 0
        self._step = 0
        self._known: dict[PromptId, tuple[Draw, int]] = {}

    def add(self, drawn: Sequence[Prompt]) -> None:
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
        self._step = step

    def of(self, prompt: PromptId) -> Draw:
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
        drawn = super().draw(counts)
        self._draws.add(drawn)
        return drawn


class Emulation:
    """Emulated devices of a run. Raises ``ValueError`` for a run that cannot be emulated."""

    def __init__(self, run: RunConfig, vocabulary: int) -> None:
        if vocabulary < BASE:
            raise ValueError(
                f"devices.emulate: the tokenizer of model.path has {vocabulary} tokens, emulated "
                f"responses need {BASE} or more: choose another model"
            )
        self._vocabulary = vocabulary
        self.emulated = Emulated(run)
        self._late: dict[int, Lateness] = {}
        self._draws = WorkloadDraws()

    @property
    def factor(self) -> float:
        return self.emulated.config.factor

    @property
    def lateness(self) -> Lateness:
        return sum(self._late.values(), Lateness())

    def problems(self, problems: Problems) -> Problems:
        return Counted(problems, self._draws)

    @property
    def start(self) -> Start:
        return StartEmulated(emulated=self.emulated, vocabulary=self._vocabulary)

    def outgoing(self, command: Any) -> Any:
        """A command for emulated workers. Requests carry their draws."""
        if isinstance(command, msg.LoadWeights):
            self._draws.begin(command.version)
        if not isinstance(command, msg.Submit):
            return command
        draws = tuple(self._draws.of(request.group) for request in command.requests)
        return Forced(requests=command.requests, draws=draws)

    def beat(self, sign: msg.Beat) -> None:
        if isinstance(sign, Punctual):
            self._late[sign.process] = sign.lateness

    def summary(self, driver_cpu_s: float, rollout_s: float, steps: int) -> dict[str, Any]:
        """The emulation's lateness, and whether the driver kept up.

        Args:
            driver_cpu_s: CPU seconds of the driver in the run's steps.
            rollout_s: emulated seconds of the rollouts.
            steps: the number of steps.
        """
        late = self.lateness
        use = driver_cpu_s * self.factor / rollout_s if rollout_s else 0.0
        behind = late.quantile(0.99) * self.factor * steps / rollout_s if rollout_s else 0.0
        return {
            "factor": self.factor,
            "lateness_ms": {
                "p50": 1e3 * late.quantile(0.5),
                "p99": 1e3 * late.quantile(0.99),
                "max": 1e3 * late.longest_s,
            },
            "driver_utilisation": use,
            "lateness_share": behind,
            "honest": use <= HONEST and behind <= PUNCTUAL,
        }
