"""Builds all parts of a job from its configuration."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rollpacker.config import RewardConfig, RunConfig, longest_response
from rollpacker.data.base import Row
from rollpacker.emulate.driver import Emulation
from rollpacker.engine.base import SamplingParams
from rollpacker.job.plan.checks import (
    check,
    check_context,
    check_ends,
    check_engine,
    check_size,
    check_tokenizer,
    check_used,
    check_written,
    races,
    stale_tokens,
)
from rollpacker.job.plan.emulated import check_emulated, emulation_of
from rollpacker.job.plan.problems import Environments, environments_of, load_data
from rollpacker.job.plan.resume import RunStart
from rollpacker.policy.engines.device_split import engine_sizes, replica_size, turns
from rollpacker.policy.engines.hardware import EngineProfile, Hardware, LatencyCurve, measured
from rollpacker.policy.grading import EmptySteps
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings
from rollpacker.runtime.attempts.attempts import Problems
from rollpacker.runtime.attempts.rewards import Rewards, check_rows
from rollpacker.runtime.cluster.nodes import Nodes, Start, ThisMachine, start_processes
from rollpacker.runtime.evaluate import Evaluator
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.pool.in_process import InProcess
from rollpacker.runtime.pool.placement import decoding_devices
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.record.run_log import RunLog, open_trackers, save_config
from rollpacker.runtime.record.samples import Texts
from rollpacker.runtime.step.driver import StepDriver, train_driver
from rollpacker.runtime.step.phase_nodes import PhaseNodes
from rollpacker.runtime.step.responses import Setup
from rollpacker.runtime.step.updates import Updates
from rollpacker.train import algorithms
from rollpacker.train.model.loading import Card, notes, read_card

if TYPE_CHECKING:
    from rollpacker.runtime.cluster.cluster import Launcher


@dataclass(slots=True, kw_only=True)
class Parts:
    """All parts of a job."""

    pool: WorkerPool
    problems: Problems
    rewards: Rewards
    policy: RolloutPolicy
    driver: StepDriver
    updates: Updates
    empty_steps: EmptySteps
    log: RunLog
    clock: Clock
    evaluator: Evaluator | None = None
    emulation: Emulation | None = None
    environments: Environments | None = None

    def close(self) -> None:
        """End all processes and close all files, even if one of them raises."""
        with contextlib.ExitStack() as stack:
            for part in (self.log, self.log.progress, self.pool, self.rewards):
                stack.callback(part.close)
            if self.environments is not None:
                stack.callback(self.environments.close)


async def build(
    config: RunConfig, folder: Path, progress: Progress, start: RunStart, phases: PhaseNodes | None
) -> Parts:
    """Build all parts. Raises ``ValueError`` for the user's mistakes, before any work is lost."""
    check(config)
    check_emulated(config)
    card = read_card(config.model)
    check_context(config, card.context)
    if config.devices.emulate is None:  # else nothing is decoded
        check_engine(config, card.kind)
    with contextlib.ExitStack() as stack:
        environments = environments_of(config, card, progress)
        stack.callback(environments.close)
        problems, held_out = load_data(config, card, progress, environments.tools)
        cap = max_completion_length(config, card, problems)
        longest = longest_response(config.environment, cap)
        said = check_used(config.rollout.tail_batching), check_size(config, problems)
        said = *said, check_written(config, card), check_tokenizer(card, problems, held_out)
        for line in chain(*said, check_ends(config, card), notes(card.generation, config.rollout)):
            progress.note(line)
        steps = total_steps(config, problems)
        rows = [*problems.rows.values(), *(held_out.rows.values() if held_out else ())]
        rewards = rewards_of(config, config.rewards, card, rows, steps)
        updates = steps * config.train.updates_per_step
        emulation = emulation_of(config, card)
        problems = problems if emulation is None else emulation.problems(problems)
        launcher, note = None if phases is None else phases.launcher, progress.note
        starter = start_processes if emulation is None else emulation.start
        nodes = nodes_of(config, launcher, starter)
        stack.callback(nodes.close)
        found = decoding_devices(config, await nodes.gather())
        sizes = engine_sizes(config, found, card.heads, card.kv_heads)
        pool = WorkerPool(
            config, max_length=longest, total_updates=updates, sizes=sizes, nodes=nodes, note=note
        )
        if emulation is not None:
            pool.outgoing, pool.beat = emulation.outgoing, emulation.beat
        stack.callback(pool.close)
        stack.callback(rewards.close)
        trackers = open_trackers(config.trackers, folder, config.model_dump(mode="json"))
        for tracker in trackers:
            stack.callback(tracker.close)
        await start_all(pool, rewards, note)
        save_config(config, folder)
        offset = 0.0 if start.state is None else start.state["clock_s"]
        clock = Clock(offset, 1.0 if emulation is None else emulation.factor)
        log = RunLog(
            folder,
            config,
            last_step=start.step - 1,
            max_length=cap,
            context=card.context if longest + problems.longest >= card.context else None,
            progress=progress,
            texts=Texts(card.tokenizer, card.read, problems.rows),
            trackers=trackers,
        )
        setup = Setup(
            workers=pool,
            problems=problems,
            rewards=rewards,
            params=sampling_params(config, card, cap),
            seed=config.seed,
            clock=clock,
            lockstep=config.deterministic,
            episodes=environments.episodes(cap, pool.info.max_length, clock),
        )
        settings = rollout_settings(config, problems, pool, cap, machine_of(config, card, pool))
        parts = assemble(config, setup, settings, pool, log, rewards, phases)
        parts.emulation, parts.environments = emulation, environments
        if held_out is not None:
            parts.evaluator = evaluator_of(config, held_out, setup, progress)
        stack.pop_all()
    return parts


def rewards_of(
    config: RunConfig,
    used: Sequence[RewardConfig],
    card: Card,
    rows: Sequence[Row],
    steps: int = 0,
) -> Rewards:
    """Build the reward functions ``used`` for these rows. Raises ``ValueError``."""
    check_rows(used, rows)
    return Rewards(
        used,
        config.grading,
        card.read,
        rows=rows,
        deterministic=config.deterministic,
        max_steps=steps,
        epochs=config.epochs,
        environment=config.environment,
    )


def evaluator_of(
    config: RunConfig, problems: Problems, setup: Setup, progress: Progress
) -> Evaluator:
    """Held-out answers are sampled without racing, at the evaluation's temperature."""
    assert config.eval is not None
    params = replace(setup.params, temperature=config.eval.temperature, top_p=1.0, top_k=0)
    setup = replace(setup, problems=problems, params=params)
    return Evaluator(config.eval, setup, progress, retries=config.rollout.max_retries)


async def start_all(pool: WorkerPool, rewards: Rewards, note: Callable[[str], None]) -> None:
    """Start the processes of rewards, then the workers."""
    for warning in rewards.start(asyncio.get_running_loop()):
        note(warning)
    await pool.start()


def assemble(
    config: RunConfig,
    setup: Setup,
    settings: RolloutSettings,
    pool: WorkerPool,
    log: RunLog,
    rewards: Rewards,
    phases: PhaseNodes | None,
) -> Parts:
    """Build the policy and its driver over started processes."""
    policy = RolloutPolicy(settings)
    tail, stale = config.rollout.tail_batching, stale_tokens(config)
    updates = Updates(
        pool,
        algorithms.build(config.train.algorithm, config.rollout.min_reward_range),
        max_length=settings.cap,
        mask_truncated=config.train.mask_truncated_completions,
        clock=setup.clock,
        sampler_is_old=config.rollout.full_softmax
        and config.train.sampler_correction.kind == "none"
        and not (tail.carries and stale != "ratio"),
        stale=stale,
        most_skipped=config.train.max_skipped_updates,
    )
    return Parts(
        pool=pool,
        problems=setup.problems,
        rewards=rewards,
        policy=policy,
        driver=train_driver(config, setup, policy, log.journal.record, updates, phases),
        updates=updates,
        empty_steps=EmptySteps(config.rollout.dynamic_sampling),
        log=log,
        clock=setup.clock,
    )


def max_completion_length(config: RunConfig, card: Card, problems: Problems) -> int:
    """The configured longest response, or the context without the longest prompt."""
    return config.rollout.max_completion_length or card.context - problems.longest


def sampling_params(config: RunConfig, card: Card, cap: int) -> SamplingParams:
    """How training responses are sampled."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=cap,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(rollout.stop),
        stop_token_ids=card.stop_token_ids,
    )


def rollout_settings(
    config: RunConfig,
    problems: Problems,
    pool: WorkerPool | InProcess,
    cap: int,
    machine: Hardware | None = None,
    *,
    hosted: bool = False,
) -> RolloutSettings:
    """The policy's settings. If the run is ``hosted``, its host trains."""
    algorithm = algorithms.build(config.train.algorithm)
    whole_batch = (
        hosted  # its host trains when it has the whole round
        or algorithm.needs_batch
        or config.train.updates_per_step > 1
    )
    info = pool.info
    return RolloutSettings.of(
        config.rollout,
        seed=config.seed,
        sizes=problems.source.quotas,
        cap=cap,
        latency=info.latency,
        engines=len(pool.engines),
        whole_batch=whole_batch,
        asynchronous=config.grading.asynchronous,
        ordered=config.deterministic,
        updates=config.train.updates_per_step,
        train_all=not hosted and (config.train.beta > 0 or algorithm.trains_equal),
        machine=machine,
        rows=LatencyCurve(info.latency).rows() if info.speculates else None,
        # On shared nodes the load of other jobs would decide which responses win a race.
        shared=bool(config.mux.url) and not (config.deterministic and races(config)),
        permits=bool(config.mux.url),
        layout=config.devices.layout,
        replica_engines=_replica_engines(config, pool),
        micro_batch_tokens=config.train.micro_batch_tokens,
        turns=not hosted and turns(config, gpus=pool.on_gpus) != "off",
    )


def machine_of(config: RunConfig, card: Card, pool: WorkerPool) -> Hardware | None:
    """The hardware model for the planner and for freeing devices, if one of them is on."""
    # Ordered gradients wait for the rollout's end, so no device can be freed.
    stays = len(pool.engines) < 2 or config.deterministic
    rules = config.rollout
    if rules.planner == "off" and (stays or rules.streaming.scaling == "off"):
        return None
    profiles = {
        size: EngineProfile(
            kv_tokens=info.kv_tokens,
            latency=info.latency,
            context_token_s=info.context_token_s or 0.0,
            prefill_token_s=info.prefill_token_s,
        )
        for size, info in pool.infos.items()
    }
    colocated = config.devices.layout == "colocated"
    decoding = len(pool.engines) * min(profiles)
    return measured(
        profiles,
        devices=decoding,
        node_size=pool.node_size,
        replica_devices=replica_size(config, decoding) if colocated else None,
        heads=card.heads,
        kv_heads=card.kv_heads,
    )


def _replica_engines(config: RunConfig, pool: WorkerPool | InProcess) -> int:
    """Engines on a colocated replica's devices. 0 if separate, or without processes."""
    size = config.engine.tensor_parallel
    if config.devices.layout == "separate" or pool.transport is None:
        return 0
    return replica_size(config, len(pool.engines) * size) // size


def total_steps(config: RunConfig, problems: Problems) -> int:
    """Steps of the whole run. Racing may take a few more at an epoch's end."""
    per_epoch = sum(problems.source.quotas.values()) / config.rollout.prompts_per_step
    rounded = int(per_epoch) if config.data.drop_last else -int(-per_epoch // 1)
    return config.steps or max(1, rounded * config.epochs)


def nodes_of(
    config: RunConfig, launcher: Launcher | None = None, start: Start = start_processes
) -> Nodes:
    """This machine, or a cluster's nodes, where Ray starts agents if there is no launcher. Raises
    ``ValueError``."""
    if not config.cluster.address:
        if config.devices.nodes > 1:
            raise ValueError(
                f"devices.nodes={config.devices.nodes} needs cluster.address: set it to the "
                "address of a Ray cluster, or to 'mux'"
            )
        return ThisMachine(config, start)
    if launcher is None and config.cluster.address == "mux":
        raise ValueError(
            "cluster.address=mux works only for runs that RollMux starts: rollpacker mux submit"
        )
    from rollpacker.runtime.cluster.cluster import RunNodes
    from rollpacker.runtime.cluster.ray_launcher import RayLauncher

    return RunNodes(config, launcher or RayLauncher(config), start)
