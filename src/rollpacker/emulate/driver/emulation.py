"""The driver's side of emulated devices: starts them, and counts draws and lateness."""

from __future__ import annotations

from typing import Any

from rollpacker.config import RunConfig
from rollpacker.emulate.agenda import Lateness
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.driver.draws import Counted, WorkloadDraws
from rollpacker.emulate.driver.hosts import StartEmulated
from rollpacker.emulate.driver.nodes import EmulatedNodes
from rollpacker.emulate.head import BASE
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.cluster.local import Start
from rollpacker.runtime.cluster.nodes import Nodes

HONEST = 0.6
"""Driver utilisation up to which the driver keeps up with the emulated devices."""
PUNCTUAL = 0.02
"""Share of a rollout that 99% of the emulated actions are late by, at most."""


class Emulation:
    """Emulated devices of a run.

    Args:
        run: the run's configuration.
        vocabulary: token ids of the run's tokenizer.

    Raises ``ValueError`` for what cannot be emulated.
    """

    def __init__(self, run: RunConfig, vocabulary: int) -> None:
        if vocabulary < BASE:
            raise ValueError(
                f"devices.emulate: the tokenizer of model.path knows {vocabulary} tokens, emulated "
                f"responses need {BASE} or more: take another model"
            )
        self._vocabulary = vocabulary
        self.emulated = Emulated(run)
        self._late: dict[int, Lateness] = {}
        self._draws = WorkloadDraws()

    @property
    def factor(self) -> float:
        """Emulated seconds in one of the clock's."""
        return self.emulated.config.factor

    @property
    def lateness(self) -> Lateness:
        """Of all actions of the emulated devices."""
        return sum(self._late.values(), Lateness())

    def problems(self, problems: Problems) -> Problems:
        """The same, whose draws are counted."""
        return Counted(problems, self._draws)

    @property
    def start(self) -> Start:
        """Starts emulated workers on a machine."""
        return StartEmulated(emulated=self.emulated, vocabulary=self._vocabulary)

    def on(self, nodes: Nodes) -> Nodes:
        """The same machines, which ``start`` so; what is said to their workers is counted."""
        return EmulatedNodes(nodes, self._draws, self._late)

    def summary(self, driver_cpu_s: float, rollout_s: float, steps: int) -> dict[str, Any]:
        """What to say of the emulation: how late it was, and whether the driver kept up.

        Args:
            driver_cpu_s: CPU seconds of the driver in the run's steps.
            rollout_s: emulated seconds of their rollouts.
            steps: how many.
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
