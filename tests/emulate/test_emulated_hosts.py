"""Processes of emulated workers, without a run."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from emulated_jobs import WORDS, job

from rollpacker.core.types import (
    AttemptId,
    EngineId,
    Group,
    GroupPart,
    Prompt,
    PromptId,
    ReplicaId,
    Sample,
    sampling_seed,
)
from rollpacker.emulate.driver import Emulation, WorkloadDraws
from rollpacker.emulate.messages import Draw
from rollpacker.engine.base import Request, SamplingParams, Span
from rollpacker.polytrace.model.workload import load_model
from rollpacker.runtime.cluster.nodes import ThisMachine
from rollpacker.runtime.ipc.link import Host
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.worker import EnginePart, ReplicaPart, WorkerSpec
from rollpacker.sim.workload.source import LengthSource
from rollpacker.sim.workload.workload import DrawnWorkload, Recorded

PAPER = {size: load_model(f"paper-{size}").lengths for size in ("8k", "16k", "32k")}

pytestmark = pytest.mark.wide

LONG = 32768
STEP = 0


def started(folder: Path, engines: int, processes: int) -> tuple[Emulation, Sequence[Host]]:
    """Hosts of engines, each beside a replica, whose responses are all very long."""
    config = job(folder, engine={"kind": "mini"}, trainer={"kind": "local"})
    emulation = Emulation(config, WORDS)
    emulation.emulated.config = emulation.emulated.config.model_copy(
        update={"factor": 1e6, "processes": processes}
    )
    traits = PAPER["32k"].traits(np.random.default_rng(0), 1)
    recorded = (Recorded(traits, np.full(64, LONG, np.int32)),)
    emulation.emulated.source = LengthSource(lengths=PAPER["32k"], recorded=recorded)
    emulation._draws.add([Prompt(id=PromptId("p0"))])
    specs = [
        WorkerSpec(
            config=config,
            rank=number,
            cores=(),
            device="emulated",
            max_length=LONG,
            total_updates=1,
            engine=EnginePart(engine=EngineId(number), span=Span(size=1)),
            replica=ReplicaPart(replica=ReplicaId(number), span=Span(size=1)),
        )
        for number in range(engines)
    ]
    return emulation, [*ThisMachine(config, emulation.start).start({0: specs}).values()]


class Heard:
    """A host, and what its worker says; None at its end."""

    def __init__(self, host: Host, emulation: Emulation) -> None:
        self.host = host
        self._emulation = emulation
        self.said: asyncio.Queue[object] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        host.link.open(loop, self.said.put_nowait, lambda: self.said.put_nowait(None))

    def send(self, command: msg.Command) -> None:
        self.host.link.send(self._emulation.outgoing(command))

    async def hear(self, kind: type) -> object:
        """The next report of this kind."""
        while not isinstance(report := await asyncio.wait_for(self.said.get(), 60), kind):
            assert report is not None
            assert not isinstance(report, msg.Died), report
        return report


@asynccontextmanager
async def running(folder: Path, engines: int, processes: int) -> AsyncIterator[list[Heard]]:
    emulation, hosts = started(folder, engines, processes)
    try:
        yield [Heard(host, emulation) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
        for host in hosts:
            host.wait(10.0)


def submit(seed: int) -> msg.Submit:
    prompt = PromptId("p0")
    requests = [
        Request(
            attempt=AttemptId(index),
            group=prompt,
            prompt=np.zeros(5, np.int32),
            params=SamplingParams(max_tokens=LONG),
            seed=sampling_seed(seed, STEP, prompt, index),
            generated=np.zeros(LONG - 1, np.int32),
            logprobs=np.zeros(LONG - 1, np.float32),
        )
        for index in range(32)
    ]
    return msg.Submit(requests=requests)


def accumulate() -> msg.Accumulate:
    samples = tuple(
        Sample(
            prompt=PromptId("p0"),
            index=index,
            attempt=AttemptId(index),
            prompt_tokens=np.zeros(5, np.int32),
            tokens=np.zeros(LONG, np.int32),
            logprobs=np.zeros(LONG, np.float32),
            finish_reason="length",
            weights_version=STEP,
        )
        for index in range(8)
    )
    group = Group(prompt=PromptId("p0"), samples=samples, advantages=np.ones(8, np.float32))
    parts = (GroupPart(prompt=PromptId("p0"), start=0, stop=8),)
    return msg.Accumulate(parts=parts, groups=[group])


def test_long_responses_in_both_directions_never_hang(tmp_path: Path) -> None:
    """The driver writes what no socket holds before it reads what no socket holds."""

    async def main() -> None:
        async with running(tmp_path, 2, 1) as hosts:
            await write_and_read(hosts)

    asyncio.run(main())


async def write_and_read(hosts: list[Heard]) -> None:
    for host in hosts:
        await host.hear(msg.Ready)
        host.send(msg.LoadWeights(version=STEP))
        await host.hear(msg.WeightsLoaded)
        host.send(msg.BeginStep())
    for host in hosts:
        host.send(submit(0))
        for _ in range(8):
            host.send(accumulate())
    for host in hosts:
        tokens = 0
        while tokens < 32 * LONG:
            finished = await host.hear(msg.Finished)
            assert isinstance(finished, msg.Finished)
            tokens += sum(len(output.tokens) for output in finished.outputs)
        for _ in range(8):
            await host.hear(msg.Accumulated)


def test_one_worker_can_be_ended_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with running(tmp_path, 4, 2) as hosts:
            await end_one(hosts)

    asyncio.run(main())


async def end_one(hosts: list[Heard]) -> None:
    for heard in hosts:
        await heard.hear(msg.Ready)
    first, second, third, fourth = (heard.host for heard in hosts)
    assert first.pid == second.pid != third.pid == fourth.pid
    first.kill()
    while await asyncio.wait_for(hosts[0].said.get(), 60) is not None:
        pass
    assert await first.end() == "exit code -9"
    hosts[1].send(msg.LoadWeights(version=STEP))
    await hosts[1].hear(msg.WeightsLoaded)
    for heard in hosts[2:]:
        heard.send(msg.Stop())
    third.wait(60)
    assert await third.end() == "exit code 0"


def test_draws_are_counted_as_a_simulation_does() -> None:
    counts = {"a": 3, "b": 5}
    workload = DrawnWorkload(PAPER["8k"], domains={"a": 1.0, "b": 1.0}, prompt_tokens=9, seed=0)
    simulated = workload.draw(counts)
    draws = WorkloadDraws()
    drawn = [Prompt(id=PromptId(f"{d}{n}"), domain=d) for d in counts for n in range(counts[d])]
    draws.add(drawn)
    numbers = {
        domain: [int(p.id[1:]) for p in simulated if p.domain == domain] for domain in counts
    }
    assert {p.id: draws.of(p.id).number for p in drawn} == {
        f"{domain}{place}": number
        for domain, mine in numbers.items()
        for place, number in enumerate(mine)
    }


def test_visits_are_steps_that_sample_a_prompt() -> None:
    draws = WorkloadDraws()
    draws.add([Prompt(id=PromptId("x"))])
    visits = []
    for step in (0, 0, 3, 3, 4):
        draws.begin(step)
        visits.append(draws.of(PromptId("x")))
    assert visits == [Draw(0, n, "default") for n in (0, 0, 1, 1, 2)]
