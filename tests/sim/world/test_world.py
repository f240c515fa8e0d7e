"""What holds in every simulated job: who is trained on, when attempts end, where gradients run."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from job_scripts import MODES, script, scripts
from scripted_job import PROMPT_TOKENS, Script, ScriptedWorkload, next_epoch

from rollpacker.core import decisions as do
from rollpacker.core import events as ev
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.sim.costs.costs import TrainCosts
from rollpacker.sim.world.world import World

SLACK = 1e-6


class Run:
    """A simulated job, its steps and its journal."""

    workload = ScriptedWorkload

    def __init__(self, script: Script) -> None:
        self.script = script
        self.policy = RolloutPolicy(script.settings())
        self.lines: list[tuple] = []
        self.results = []
        self.starts: list[int] = []
        workload = self.workload(script)
        costs = script.costs()
        world = World(self.policy, workload, costs, record=self.record)
        for step in range(script.steps):
            next_epoch(workload.source, self.policy)
            self.starts.append(len(self.lines))
            self.results.append(world.run_step(step))

    def record(self, now, event, made) -> None:
        self.lines.append((now, event, list(made)))

    def steps(self):
        found, carried = [], {}
        ends = [*self.starts[1:], None]
        for begin, end, result in zip(self.starts, ends, self.results, strict=True):
            found.append(Step(self.script, self.lines[begin:end], result, carried))
            carried = found[-1].carried() if self.carries else {}
        return found

    @property
    def carries(self) -> bool:
        return self.script.rollout["tail_batching"]["mode"] == "partial"


class Step:
    """One step's journal, indexed; ``carried``: tokens of samples of prompts from earlier steps."""

    def __init__(self, script: Script, lines, result, carried) -> None:
        self.script, self.lines, self.result = script, lines, result
        self.before = carried
        self.stale: Counter[int] = Counter()
        self.prompt: dict[int, str] = {}
        self.index: dict[int, int] = {}
        self.deferred: set[str] = set()
        self.tokens: dict[int, int] = {}
        self.added: Counter[int] = Counter()
        self.acting: set[int] = set()
        self.waiting_moves = 0
        self.rewards: dict[int, float] = {}
        self.stays: dict[int, list[list]] = defaultdict(list)
        self.groups: list[do.AcceptGroup] = []
        self.gone: set[int] = set()
        for now, event, made in lines:
            self.take(now, event)
            for decision in made:
                self.follow(now, decision)

    def take(self, now, event) -> None:
        match event:
            case ev.AttemptFinished() | ev.AttemptAborted():
                if event.attempt not in self.tokens:
                    self.leave(now, event.attempt)
                    self.tokens[event.attempt] = event.tokens
                if isinstance(event, ev.AttemptFinished):
                    assert event.carried == self.stale[event.attempt]
            case ev.TurnFinished():
                self.leave(now, event.attempt)
                self.acting.add(event.attempt)
            case ev.EnvironmentReplied():
                self.added[event.attempt] += event.tokens
            case ev.AttemptMigrated() if event.attempt in self.acting:
                self.waiting_moves += 1
            case ev.AttemptMigrated():
                self.leave(now, event.attempt)
                self.stays[event.attempt].append([event.engine, now, None])
            case ev.AttemptGraded():
                assert event.attempt not in self.gone, "graded although it was aborted"
                assert event.attempt not in self.rewards, "graded twice"
                self.rewards[event.attempt] = event.reward
            case _:
                pass

    def leave(self, now, attempt) -> None:
        """It leaves its engine, if it is not at its environment."""
        if attempt not in self.acting:
            self.stays[attempt][-1][2] = now

    def follow(self, now, decision) -> None:
        match decision:
            case do.StartAttempt():
                self.prompt[decision.attempt] = decision.prompt
                self.index[decision.attempt] = decision.index
                earlier = self.before.get((decision.prompt, decision.index), 0)
                self.stale[decision.attempt] = earlier
                if self.script.tools:
                    self.acting.add(decision.attempt)
                else:
                    self.stays[decision.attempt].append([decision.engine, now, None])
            case do.ContinueAttempt():
                self.acting.remove(decision.attempt)
                self.stays[decision.attempt].append([decision.engine, now, None])
            case do.AbortAttempt():
                self.gone.add(decision.attempt)
            case do.AcceptGroup():
                self.groups.append(decision)
            case do.DeferPrompt():
                self.deferred.add(decision.prompt.id)
            case _:
                pass

    def carried(self) -> dict[tuple[str, int], int]:
        """Tokens of what was deferred, by prompt and sample."""
        return {
            (self.prompt[attempt], self.index[attempt]): tokens
            for attempt, tokens in self.tokens.items()
            if self.prompt[attempt] in self.deferred
        }

    def gradients_s(self) -> float:
        """What the kept samples must cost."""
        train: TrainCosts = self.script.costs().train
        return sum(
            train.sequence_s(self.tokens[a] + self.added[a])
            for group in self.groups
            if len({self.rewards[b] for b in group.attempts}) > 1
            for a in group.attempts
        )


def check_step(step: Step) -> None:
    times = [now for now, _, _ in step.lines]
    assert times == sorted(times)
    assert all(stays[-1][2] is not None for stays in step.stays.values()), "an attempt never ended"
    wanted = step.script.rollout["num_generations"]
    for group in step.groups:
        assert len(set(group.attempts)) == wanted
        assert {step.prompt[a] for a in group.attempts} == {group.prompt}
        assert not step.gone & set(group.attempts)
    check_gradients(step)
    check_result(step)


def check_gradients(step: Step) -> None:
    """All kept samples and nothing else, each where nothing decodes."""
    total = 0.0
    parts: Counter = Counter()
    for now, event, _ in step.lines:
        if isinstance(event, ev.GradientsAccumulated):
            total += event.seconds
            begun = now - event.seconds
            for stays in step.stays.values():
                for worker, since, until in stays:
                    holds = since < begun - SLACK and until > begun + SLACK
                    assert not (worker == event.replica and holds), "trained while it decoded"
            parts.update((p.prompt, i) for p in event.parts for i in range(p.start, p.stop))
    kept = Counter((g.prompt, i) for g in step.groups for i in range(len(g.attempts)))
    assert parts == kept
    assert total == pytest.approx(step.gradients_s(), abs=1e-4)


def check_result(step: Step) -> None:
    result = step.result
    assert 0.0 <= result.bubble <= 1.0
    assert result.samples == sum(len(group.attempts) for group in step.groups)
    every = [a for group in step.groups for a in group.attempts]
    assert result.kept_tokens == sum(step.tokens[a] for a in every)
    assert result.stale_tokens == sum(step.stale[a] for a in every)
    engine = step.script.costs().engine(1)
    longest = max((step.tokens[a] - step.stale[a] for a in every), default=0)
    alone = longest * engine.step_s(1, PROMPT_TOKENS + longest / 2) if longest else 0.0
    assert result.rollout_s >= alone * (1 - SLACK)
    assert result.step_s >= result.rollout_s
    assert result.decoded_tokens == sum(step.tokens.values()) - step.stale.total()


def check_once(run: Run) -> None:
    """Every drawn prompt is trained on, dropped, or still waits."""
    drawn, done = Counter(), Counter()
    for _, event, made in run.lines:
        if isinstance(event, ev.PromptsDrawn):
            drawn.update(prompt.id for prompt in event.prompts)
        done.update(d.prompt for d in made if isinstance(d, do.AcceptGroup | do.DropGroup))
    assert not done - drawn
    assert sum((drawn - done).values()) == run.policy.queue


@settings(max_examples=settings().max_examples // 2)
@given(scripts())
def test_any_job_keeps_its_promises(script: Script) -> None:
    run = Run(script)
    check_once(run)
    for step in run.steps():
        check_step(step)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_job_twice(mode: str) -> None:
    one, two = Run(script(mode)), Run(script(mode))
    assert one.lines == two.lines
    assert one.results == two.results


def test_a_worker_that_sums_gradients_takes_new_attempts_afterwards() -> None:
    """Dynamic sampling draws prompts while freed workers train: they decode when they are done."""
    given = script("exact", sampling={"enabled": True}, responses=2, prompts=8, workers=4)
    late = 0
    for step in Run(given).steps():
        check_step(step)
        tasks = [
            (event.replica, now - event.seconds, now)
            for now, event, _ in step.lines
            if isinstance(event, ev.GradientsAccumulated)
        ]
        unmoved = {attempt: stays for attempt, stays in step.stays.items() if len(stays) == 1}
        for attempt, stays in unmoved.items():
            for worker, since, until in stays:
                for trainer, begun, ended in tasks:
                    if worker == trainer and begun < since < ended:
                        late += 1
                        fastest = given.costs().engine(1).step_s(1, PROMPT_TOKENS)
                        assert until >= ended + fastest * (step.tokens[attempt] - SLACK)
    assert late


def test_an_abort_takes_effect_where_the_step_in_flight_ends() -> None:
    run = Run(script("race"))
    asked, delays = {}, []
    for now, event, made in run.lines:
        asked.update((d.attempt, now) for d in made if isinstance(d, do.AbortAttempt))
        if isinstance(event, ev.AttemptAborted):
            delays.append(now - asked[event.attempt])
    longest = run.script.costs().engine(1).step_s(64, 64 * run.script.cap)
    assert min(delays) >= 0.0
    assert 0.0 < max(delays) < longest
