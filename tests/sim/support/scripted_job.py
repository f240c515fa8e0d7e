"""A job that the runtime and the simulator are both given, and the simulator's run of it."""

from dataclasses import dataclass, field

import numpy as np

from rollpacker.config import FakeEngineConfig, RolloutConfig
from rollpacker.core.types import Prompt, PromptId, sampling_seed
from rollpacker.data.source import PromptSource
from rollpacker.engine.fake import scripted_length
from rollpacker.policy.engines.fleet import colocated, grid
from rollpacker.policy.engines.hardware import EngineProfile, Hardware, measured
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings
from rollpacker.sim.costs.costs import CurveCosts, RewardCosts, TrainCosts
from rollpacker.sim.costs.hardware import MeasuredDevice
from rollpacker.sim.workload.workload import ScriptedTurn, Turns
from rollpacker.sim.world.machines import WorldCosts
from rollpacker.sim.world.world import World

PROMPT_TOKENS = 7
LATENCY = {1: 0.0101, 4: 0.0117, 16: 0.0239, 64: 0.0711}


@dataclass(frozen=True, kw_only=True)
class Script:
    """A job that both drivers run."""

    rollout: dict
    sizes: dict[str, int]
    lengths: list[int]
    cap: int
    steps: int
    kinds: dict[str, str] = field(default_factory=dict)
    workers: int = 3
    concurrency: int = 64
    seed: int = 0
    ordered: bool = False
    updates: int = 1
    judge_slots: int = 4
    tools: bool = False
    """An environment takes part in every response."""

    def costs(self) -> WorldCosts:
        device = MeasuredDevice(
            latency=LATENCY, kv_tokens=10**9, prefill_token_s=0.0, context_token_s=1.7e-6
        )
        return WorldCosts(
            fleet=colocated(grid(self.workers, self.workers), tensor_parallel=1, replica=1),
            engine=lambda _devices: CurveCosts(device),
            max_running=self.concurrency,
            train=TrainCosts(launch_s=0.0113, token_s=3.1e-4, prompt_tokens=PROMPT_TOKENS),
            start_s=0.37,
            sync_s=0.21,
            apply_s=0.0531,
            rewards=RewardCosts(
                math_s=0.0457, judge_s=0.317, judge_idle=1.0, judge_slots=self.judge_slots
            ),
            kinds=dict(self.kinds),
        )

    def settings(self) -> RolloutSettings:
        rollout = RolloutConfig.model_validate(self.rollout)
        return RolloutSettings.of(
            rollout,
            seed=self.seed,
            sizes=self.sizes,
            cap=self.cap,
            latency=LATENCY,
            engines=self.workers,
            whole_batch=self.updates > 1,
            ordered=self.ordered,
            updates=self.updates,
            machine=None if rollout.streaming.scaling == "off" else self.machine(),
        )

    def machine(self) -> Hardware:
        profile = EngineProfile(
            kv_tokens=10**9, latency=LATENCY, context_token_s=1.7e-6, prefill_token_s=1e-4
        )
        return measured({1: profile}, devices=self.workers, node_size=self.workers)

    def engine(self) -> FakeEngineConfig:
        return FakeEngineConfig(lengths=self.lengths)

    def source(self) -> PromptSource:
        prompts = [
            Prompt(id=PromptId(f"{domain}{i}"), domain=domain, tokens=PROMPT_TOKENS)
            for domain, count in self.sizes.items()
            for i in range(count)
        ]
        return PromptSource(prompts, self.seed)


@dataclass
class Journal:
    """Every event with its decisions."""

    lines: list[tuple] = field(default_factory=list)

    def record(self, now, event, made) -> None:
        self.lines.append((now, event, list(made)))


def scripted_turns(script: Script, seed: int) -> Turns:
    """The response that this seed gives, uncut; no turn ends exactly at the cap."""
    tokens = scripted_length(script.engine(), seed)
    if not script.tools:
        return (ScriptedTurn(tokens),)
    rng = np.random.default_rng(seed)
    inner = np.setdiff1d(np.arange(1, tokens), [script.cap])
    count = int(rng.integers(0, min(3, len(inner)) + 1))
    cuts = np.sort(rng.choice(inner, count, replace=False))
    parts = np.diff([0, *cuts, tokens]).tolist()
    waits = (rng.choice([0.013, 0.4, 3.0], count + 2) * rng.uniform(0.5, 1.5, count + 2)).tolist()
    added = [*rng.integers(1, 40, count).tolist(), 0]
    return (ScriptedTurn(0, waits.pop()), *map(ScriptedTurn, parts, waits, added))


def scripted_reward(seed: int) -> float:
    """0 or 1: in some groups all are alike."""
    return float(seed >> 8 & 1)


def next_epoch(source: PromptSource, policy: RolloutPolicy) -> None:
    if not sum(source.remaining().values()) + policy.queue:
        source.next_epoch()


# The simulator -------------------------------------------------------------------------------


class ScriptedWorkload:
    """What a world samples, from the script."""

    prompt_tokens = PROMPT_TOKENS

    def __init__(self, script: Script) -> None:
        self.source = script.source()
        self._script = script

    def remaining(self):
        return self.source.remaining()

    def draw(self, counts):
        return self.source.draw(counts)

    def turns(self, step, prompt, index) -> Turns:
        seed = sampling_seed(self._script.seed, step, prompt, index)
        return scripted_turns(self._script, seed)

    def reward(self, step, prompt, index) -> float:
        return scripted_reward(sampling_seed(self._script.seed, step, prompt, index))

    def domain(self, prompt) -> str:
        return prompt.rstrip("0123456789")

    def run_s(self, step, prompt, index) -> float:
        return 0.0

    def forget(self, prompt) -> None:
        pass


def simulate(script: Script) -> Journal:
    journal = Journal()
    policy = RolloutPolicy(script.settings())
    workload = ScriptedWorkload(script)
    world = World(policy, workload, script.costs(), record=journal.record)
    for step in range(script.steps):
        next_epoch(workload.source, policy)
        world.run_step(step)
    return journal
