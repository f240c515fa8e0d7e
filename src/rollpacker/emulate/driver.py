"""The driver's side of emulated devices.

Nothing here decodes or trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rollpacker.config import RunConfig
from rollpacker.core.types import Prompt, PromptId
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.hosts import StartEmulated
from rollpacker.emulate.messages import Draw, Lateness, Punctual, forced
from rollpacker.emulate.reward import BASE
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.cluster.local import Start
from rollpacker.runtime.cluster.nodes import Node, Nodes
from rollpacker.runtime.ipc.link import DriverChannel, Host
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.worker import WorkerSpec
from rollpacker.sim.workload.workload import interleaved

# --- draws: Which prompt of the workload each prompt of an emulated run stands for.


class WorkloadDraws:
    """Which prompt of the workload each prompt stands for: draws are counted as a simulation
    does."""

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
        drawn = super().draw(counts)
        self._draws.add(drawn)
        return drawn


# --- nodes: The machines of an emulated run, whichever they are: what is said to the workers on
# them.


class EmulatedNodes:
    """Machines that start emulated workers.

    Args:
        nodes: the machines.
        draws: of the run.
        late: takes how late the actions of each process were.
    """

    def __init__(self, nodes: Nodes, draws: WorkloadDraws, late: dict[int, Lateness]) -> None:
        self._nodes = nodes
        self._draws = draws
        self._late = late

    async def gather(self) -> Sequence[Node]:
        """Wait for all of them."""
        return await self._nodes.gather()

    def start(self, specs: Mapping[int, Sequence[WorkerSpec]]) -> Mapping[int, Host]:
        """Start workers, whose requests will say what they stand for."""
        hosts = self._nodes.start(specs)
        return {
            number: EmulatedHost(host, _Told(host.link, self._draws, self._late))
            for number, host in hosts.items()
        }

    @property
    def lost(self) -> Collection[int]:
        return self._nodes.lost

    def regain(self) -> Mapping[int, Node]:
        """Begin to bring them back."""
        return self._nodes.regain()

    def fence(self, stop_at: float | None) -> None:
        """They share no devices with anybody."""

    def store(self) -> str:
        return "emulated/"

    def close(self) -> None:
        """Nobody is needed any more."""
        self._nodes.close()


class EmulatedHost:
    """What an emulated worker runs in.

    Args:
        host: that, as its node has started it.
        link: to the worker.
    """

    def __init__(self, host: Host, link: DriverChannel) -> None:
        self.link = link
        self._host = host

    @property
    def pid(self) -> int:
        """Its process, which has others too."""
        return self._host.pid

    def wait(self, seconds: float) -> None:
        """Give it so long to end by itself."""
        self._host.wait(seconds)

    def kill(self) -> None:
        self._host.kill()

    async def end(self, seconds: float = 5.0) -> str:
        """How it ended, in words."""
        return await self._host.end(seconds)


class _Told:
    """The driver's end of a channel to an emulated worker, which is told what requests stand for,
    and tells how late it was."""

    def __init__(
        self, line: DriverChannel, draws: WorkloadDraws, late: dict[int, Lateness]
    ) -> None:
        self._line = line
        self._draws = draws
        self._late = late
        self.send_encoded = line.send_encoded
        self.close = line.close

    def send(self, message: Any) -> None:
        """Send a message; requests with what they stand for."""
        if isinstance(message, msg.LoadWeights):
            self._draws.begin(message.version)
        elif isinstance(message, msg.Submit):
            message = forced(message, tuple(self._draws.of(r.group) for r in message.requests))
        self._line.send(message)

    def open(
        self,
        loop: asyncio.AbstractEventLoop,
        hear: Callable[[Any], None],
        gone: Callable[[], None],
        sign: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to listen; what is said of lateness is noted on the way."""

        def noted(report: Any) -> None:
            if isinstance(report, Punctual):
                self._late[report.process] = report.lateness
            hear(report)

        self._line.open(loop, noted, gone, sign)


# --- emulation: The driver's side of emulated devices: starts them, and counts draws and lateness.

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
