"""Emulated engines and replicas in a process without processes: the clock is the test's."""

from pathlib import Path

import numpy as np
import pytest
from emulated_jobs import WORDS, job, write_devices

from rollpacker.core.types import (
    AttemptId,
    EngineId,
    Group,
    GroupPart,
    PromptId,
    ReplicaId,
    Sample,
    sampling_seed,
)
from rollpacker.emulate.config import Emulated
from rollpacker.emulate.messages import Draw, Forced, WallAgenda
from rollpacker.emulate.reward import head_of, read_head
from rollpacker.emulate.worker import EmulatedEngine, EmulatedReplica, EmulatedResponses
from rollpacker.engine.base import Output, Request, SamplingParams, Span
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.worker.worker import EnginePart, ReplicaPart
from rollpacker.sim.workload.workload import DrawnWorkload
from rollpacker.sim.world.worker import SimWorker

CAP = 4096
STEP = 7


class Process:
    """Engines on an agenda whose clock jumps to the next action."""

    def __init__(self, folder: Path) -> None:
        self.emulated = Emulated(job(folder))
        self._wall = 0.0
        self.agenda = WallAgenda(self.emulated.config.factor, lambda: self._wall)
        self.responses = EmulatedResponses(self.emulated, CAP, WORDS)
        self.engines: list[EmulatedEngine] = []
        self.said: list[tuple[int, float, msg.Report]] = []
        self._touched: list[SimWorker] = []

    def touch(self, worker: SimWorker) -> None:
        self._touched.append(worker)

    def overlapping(self, engine: EmulatedEngine) -> list[EmulatedEngine]:
        return [
            one for one in self.engines if one is not engine and {*one.covers} & {*engine.covers}
        ]

    def add(self, engine: int, size: int = 2, *, resting: bool = False) -> EmulatedEngine:
        part = EnginePart(engine=EngineId(engine), span=Span(size=size), resting=resting)
        place = len(self.engines)
        added = EmulatedEngine(self, part, 2, lambda report: self.hear(place, report))
        self.engines.append(added)
        return added

    def hear(self, who: int, report: msg.Report) -> None:
        self.said.append((who, self.agenda.now, report))

    def tell(
        self, who: EmulatedEngine | EmulatedReplica, *commands: msg.Command, after: float = 0.0
    ) -> None:
        """Commands come after so many seconds."""
        for command in commands:
            self.agenda.after(after, lambda c=command: who.commands[type(c)](c))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while (due := self.agenda.next_at) is not None:
            self._wall = max(self._wall, self.agenda.clock_s(due) + 1e-12)
            self.agenda.run_due()
            while self._touched and (self.agenda.next_at or np.inf) > self.agenda.now:
                self._touched.pop(0).settle()

    def outputs(self) -> list[Output]:
        return [
            output
            for _, _, report in self.said
            if isinstance(report, msg.Finished | msg.Aborted)
            for output in report.outputs
        ]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def request(number: int, index: int, attempt: int, begun: Output | None = None) -> Request:
    prompt = PromptId(f"p{number}")
    return Request(
        attempt=AttemptId(attempt),
        group=prompt,
        prompt=np.zeros(5, np.int32),
        params=SamplingParams(max_tokens=CAP),
        seed=sampling_seed(0, STEP, prompt, index),
        **({} if begun is None else {"generated": begun.tokens, "logprobs": begun.logprobs}),
    )


def forced(*requests: Request, visits: int = 0) -> Forced:
    draws = tuple(Draw(int(each.group[1:]), visits, "default") for each in requests)
    return Forced(requests=list(requests), draws=draws)


def ready(engine: EmulatedEngine, process: Process) -> None:
    process.tell(engine, msg.LoadWeights(version=STEP))
    process.run()
    process.tell(engine, msg.BeginStep())


def workload(process: Process) -> DrawnWorkload:
    source = process.emulated.source
    drawn = DrawnWorkload(source.lengths, domains={"default": 1.0}, prompt_tokens=200, seed=0)
    drawn.draw({"default": 8})
    return drawn


def test_weights_take_the_calibrations_time(process: Process) -> None:
    ready(process.add(0), process)
    ((_, at, report),) = process.said
    assert isinstance(report, msg.WeightsLoaded)
    assert (report.version, report.size) == (STEP, 2)
    assert at == pytest.approx(13.0 + 10.0)


def test_lengths_are_the_simulators(process: Process) -> None:
    engine, drawn = process.add(0), workload(process)
    ready(engine, process)
    wanted = {(n, i): (n * 10 + i) for n in range(3) for i in (2, 0, 1)}
    process.tell(engine, forced(*(request(n, i, a) for (n, i), a in wanted.items())))
    process.run()
    found = {output.attempt: output for output in process.outputs()}
    for (number, index), attempt in wanted.items():
        length = min(CAP, drawn.length(STEP, PromptId(f"p{number}"), index))
        output = found[AttemptId(attempt)]
        assert (len(output.tokens), len(output.logprobs)) == (length, length)
        assert output.finish_reason == ("length" if length == CAP else "stop")
        assert output.weights_version == STEP
        assert 0 <= output.tokens.min() <= output.tokens.max() < WORDS


def test_a_later_visit_has_other_lengths(process: Process) -> None:
    engine, drawn = process.add(0), workload(process)
    ready(engine, process)
    process.tell(engine, forced(request(0, 0, 0), visits=1))
    process.run()
    drawn.length(STEP - 1, PromptId("p0"), 0)
    (output,) = process.outputs()
    assert len(output.tokens) == min(CAP, drawn.length(STEP, PromptId("p0"), 0))


def test_what_moves_goes_on_where_it_was(process: Process) -> None:
    one, two, three = process.add(0), process.add(1), process.add(2)
    for engine in (one, two, three):
        ready(engine, process)
    process.tell(one, forced(request(0, 0, 0)))
    process.tell(three, forced(request(0, 0, 9)))
    process.tell(one, msg.Abort(attempts=[AttemptId(0), AttemptId(77)]), after=2.0)
    process.run()
    part, whole = process.outputs()
    assert part.finish_reason == "abort"
    process.tell(two, forced(request(0, 0, 1, part)))
    process.run()
    moved = process.outputs()[-1]
    assert 0 < len(part.tokens) < len(whole.tokens)
    np.testing.assert_array_equal(part.tokens, whole.tokens[: len(part.tokens)])
    np.testing.assert_array_equal(moved.tokens, whole.tokens)
    np.testing.assert_array_equal(moved.logprobs, whole.logprobs)


def test_a_formed_engine_waits_until_its_members_sleep(process: Process) -> None:
    one, two = process.add(0), process.add(1)
    both = process.add(0, 4, resting=True)
    for engine in (one, two):
        ready(engine, process)
    process.tell(one, forced(request(0, 0, 0)))
    process.said.clear()
    process.tell(one, msg.Abort(attempts=[AttemptId(0)]), msg.Sleep(), after=2.0)
    process.tell(two, msg.Sleep(), after=2.0)
    process.tell(both, msg.LoadWeights(version=STEP), after=2.0)
    process.run()
    said = [(who, type(report).__name__) for who, _, report in process.said]
    assert said == [(1, "Slept"), (0, "Aborted"), (0, "Slept"), (2, "WeightsLoaded")]
    assert process.said[-1][1] - process.said[1][1] < 1e-6  # forming takes no time of its own
    process.tell(both, forced(request(0, 0, 1, process.outputs()[0])))
    process.run()
    assert process.outputs()[-1].finish_reason in ("stop", "length")


def test_what_never_fits_is_refused(process: Process) -> None:
    engine = process.add(0)
    ready(engine, process)
    engine._costs.capacity = 100.0
    process.tell(engine, forced(request(0, 0, 4)))
    process.run()
    (failed,) = [report for _, _, report in process.said if isinstance(report, msg.Failed)]
    assert failed.attempts == [AttemptId(4)]


def group(lengths: list[int], advantages: list[float]) -> Group:
    samples = tuple(
        Sample(
            prompt=PromptId("p0"),
            index=index,
            attempt=AttemptId(index),
            prompt_tokens=np.zeros(5, np.int32),
            tokens=np.zeros(length, np.int32),
            logprobs=np.zeros(length, np.float32),
            finish_reason="stop",
            weights_version=STEP,
        )
        for index, length in enumerate(lengths)
    )
    return Group(
        prompt=PromptId("p0"), samples=samples, advantages=np.array(advantages, np.float32)
    )


def test_gradients_take_the_simulators_time(process: Process) -> None:
    part = ReplicaPart(replica=ReplicaId(0), span=Span(size=4))
    replica = EmulatedReplica(process, part, lambda report: process.hear(0, report), None)
    parts = (GroupPart(prompt=PromptId("p0"), start=0, stop=2),)
    groups = [group([100, 300], [1.0, -1.0]), group([500, 500], [0.0, 0.0])]
    process.tell(replica, msg.Accumulate(parts=parts, groups=groups))
    process.run()
    costs = process.emulated.calibration.training(4)
    seconds = costs.sequence_s(100) + costs.sequence_s(300)
    ((_, at, report),) = process.said
    assert isinstance(report, msg.Accumulated)
    assert at == pytest.approx(seconds)
    factor = process.emulated.config.factor
    assert (report.end_s - report.start_s) * factor == pytest.approx(seconds)
    assert (report.partial.tokens, report.partial.samples) == (1400, 4)


@pytest.mark.parametrize(("reward", "seconds"), [(0.0, 0.0), (1.0, 0.0123), (-0.5, 4.2)])
def test_graders_read_what_engines_wrote(reward: float, seconds: float) -> None:
    assert read_head(head_of(reward, seconds).tolist()) == pytest.approx((reward, seconds))


def test_devices_are_refused_in_one_line(tmp_path: Path) -> None:
    job(tmp_path)
    for changes, word in (
        ({"calibration": "nothing"}, "nothing"),
        ({"workload": "search"}, "turns"),
        ({"speed": 3}, "speed"),
    ):
        path = write_devices(tmp_path / "wrong.yaml", **changes)
        with pytest.raises(ValueError, match=word) as refused:
            Emulated(job(tmp_path, devices__emulate=str(path)))
        assert "\n" not in str(refused.value)
