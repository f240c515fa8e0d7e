"""Builds a job's parts from its configuration: the one place that knows them all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rollpacker.config import EvalConfig, RunConfig, longest_response
from rollpacker.emulate.driver.emulation import Emulation
from rollpacker.engine.base import SamplingParams
from rollpacker.job.plan.checks import (
    check,
    check_ends,
    check_engine,
    check_length,
    check_size,
    check_tokenizer,
    check_used,
    check_written,
    races,
    stale_tokens,
)
from rollpacker.job.plan.emulated import check_emulated, emulation_of
from rollpacker.job.plan.environments import Environments, environments_of
from rollpacker.job.plan.machine import machine_of
from rollpacker.job.plan.nodes import nodes_of
from rollpacker.job.plan.problems import load_data
from rollpacker.job.plan.resume import RunStart
from rollpacker.policy.engines.device_split import engine_sizes, replica_size, turns
from rollpacker.policy.engines.hardware import Hardware, LatencyCurve
from rollpacker.policy.grading import EmptySteps
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings
from rollpacker.runtime.attempts.detokenizer import Texts
from rollpacker.runtime.attempts.problems import Problems
from rollpacker.runtime.attempts.rewards import Rewards, check_rows
from rollpacker.runtime.cluster.nodes import Node, Nodes
from rollpacker.runtime.evaluate import Evaluator
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.pool.in_process import InProcess
from rollpacker.runtime.pool.placement import decoding_devices
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.runtime.record.metrics import Counters, Metrics
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.record.run_log import RunLog, Tracker, open_trackers, save_config
from rollpacker.runtime.step.episodes import Episodes
from rollpacker.runtime.step.phase_nodes import PhaseNodes
from rollpacker.runtime.step.rollout import Rollout
from rollpacker.runtime.step.step import StepRecord
from rollpacker.runtime.step.updates import Updates
from rollpacker.train import algorithms
from rollpacker.train.model.card import Card, read_card
from rollpacker.train.model.generation import notes


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a job is made of."""

    pool: WorkerPool
    problems: Problems
    rewards: Rewards
    policy: RolloutPolicy
    rollout: Rollout
    updates: Updates
    empty_steps: EmptySteps
    log: RunLog
    clock: Clock
    evaluator: Evaluator | None = None
    emulation: Emulation | None = None
    environments: Environments | None = None

    def journal_head(self) -> dict[str, Any]:
        """What the journal's next line is to begin with."""
        return self.policy.journal_head()

    async def write_step(self, record: StepRecord, counters: Counters, extra: Metrics) -> None:
        """Write a step that is over, ``extra`` metrics with it."""
        await self.log.step(
            record,
            self.updates.groups,
            policy=self.policy,
            counters=counters,
            epoch=self.problems.source.passed,
            extra=extra,
        )

    def close(self) -> None:
        """End all processes and close all files, whatever keeps one of them from it."""
        with contextlib.ExitStack() as stack:
            for part in (self.log, self.log.progress, self.pool, self.rewards):
                stack.callback(part.close)
            if self.environments is not None:
                stack.callback(self.environments.close)


async def build(
    config: RunConfig, folder: Path, progress: Progress, start: RunStart, phases: PhaseNodes | None
) -> Parts:
    """Build everything. Raises ``ValueError`` for the user's mistakes, before any work is lost."""
    check(config)
    check_emulated(config)
    card = read_card(config.model)
    check_length(config, card)
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
        rewards = _rewards(config, card, problems, held_out, steps)
        updates = steps * config.train.updates_per_step
        emulation = emulation_of(config, card)
        problems = problems if emulation is None else emulation.problems(problems)
        nodes, note = _nodes(config, phases, emulation), progress.note
        stack.callback(nodes.close)
        sizes = tensor_parallel_sizes(config, card, await nodes.gather())
        pool = WorkerPool(
            config, max_length=longest, total_updates=updates, sizes=sizes, nodes=nodes, note=note
        )
        trackers = await _start(config, folder, progress, rewards, pool, stack)
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
        params = sampling_params(config, card, cap)
        machine = machine_of(config, card, pool)
        settings = rollout_settings(config, problems, pool, cap, machine)
        episodes = environments.episodes(cap, pool.info.max_length, clock)
        parts = assemble(
            config, settings, pool, problems, rewards, params, log, clock, phases, episodes
        )
        parts.emulation, parts.environments = emulation, environments
        parts.evaluator = _evaluator(config, held_out, parts, params, episodes)
        stack.pop_all()
    return parts


def _rewards(
    config: RunConfig, card: Card, problems: Problems, held_out: Problems | None, steps: int
) -> Rewards:
    """The processes of reward functions, which fit the rows. Raises ``ValueError``."""
    rows = [*problems.rows.values(), *(held_out.rows.values() if held_out else ())]
    check_rows(config.rewards, rows)
    return Rewards(
        config.rewards,
        config.grading,
        card.read,
        rows=rows,
        deterministic=config.deterministic,
        max_steps=steps,
        epochs=config.epochs,
        environment=config.environment,
    )


def _nodes(config: RunConfig, phases: PhaseNodes | None, emulation: Emulation | None) -> Nodes:
    if emulation is None:
        return nodes_of(config, None if phases is None else phases.launcher)
    return emulation.on(nodes_of(config, start=emulation.start))


def _evaluator(
    config: RunConfig,
    held_out: Problems | None,
    parts: Parts,
    params: SamplingParams,
    episodes: Episodes | None,
) -> Evaluator | None:
    if config.eval is None or held_out is None:
        return None
    return Evaluator(
        config.eval,
        config.seed,
        problems=held_out,
        workers=parts.pool,
        rewards=parts.rewards,
        params=evaluation_params(params, config.eval),
        clock=parts.clock,
        progress=parts.log.progress,
        episodes=episodes,
        retries=config.rollout.max_retries,
    )


async def _start(
    config: RunConfig,
    folder: Path,
    progress: Progress,
    rewards: Rewards,
    pool: WorkerPool,
    stack: contextlib.ExitStack,
) -> list[Tracker]:
    """Start all processes and the trackers; ``stack`` ends them."""
    stack.callback(pool.close)
    stack.callback(rewards.close)
    trackers = open_trackers(config.trackers, folder, config.model_dump(mode="json"))
    for tracker in trackers:
        stack.callback(tracker.close)
    for warning in rewards.start(asyncio.get_running_loop()):
        progress.note(warning)
    await pool.start()
    return trackers


def assemble(
    config: RunConfig,
    settings: RolloutSettings,
    pool: WorkerPool,
    problems: Problems,
    rewards: Rewards,
    params: SamplingParams,
    log: RunLog,
    clock: Clock,
    phases: PhaseNodes | None,
    episodes: Episodes | None = None,
) -> Parts:
    """The policy and its driver over started processes."""
    policy = RolloutPolicy(settings)
    tail, stale = config.rollout.tail_batching, stale_tokens(config)
    updates = Updates(
        pool,
        algorithms.build(config.train.algorithm, config.rollout.min_reward_range),
        max_length=settings.cap,
        mask_truncated=config.train.mask_truncated_completions,
        clock=clock,
        sampler_is_old=config.rollout.full_softmax
        and config.train.sampler_correction.kind == "none"
        and not (tail.carries and stale != "ratio"),
        stale=stale,
        most_skipped=config.train.max_skipped_updates,
    )
    rollout = Rollout(
        config,
        policy,
        workers=pool,
        problems=problems,
        rewards=rewards,
        updates=updates,
        params=params,
        journal=log.journal,
        clock=clock,
        phases=phases,
        episodes=episodes,
    )
    return Parts(
        pool=pool,
        problems=problems,
        rewards=rewards,
        policy=policy,
        rollout=rollout,
        updates=updates,
        empty_steps=EmptySteps(config.rollout.dynamic_sampling),
        log=log,
        clock=clock,
    )


def max_completion_length(config: RunConfig, card: Card, problems: Problems) -> int:
    """The configured longest response, or what the longest prompt leaves of the context."""
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


def evaluation_params(params: SamplingParams, config: EvalConfig) -> SamplingParams:
    """How held-out answers are sampled: plain, at the evaluation's temperature."""
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=config.temperature,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
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
    """What the policy is told of this run; where it is ``hosted``, somebody else trains."""
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
        # Whoever finishes first wins a race: with others on the nodes, that may be others.
        shared=bool(config.mux.url) and not (config.deterministic and races(config)),
        permits=bool(config.mux.url),
        layout=config.devices.layout,
        replica_engines=_replica_engines(config, pool),
        micro_batch_tokens=config.train.micro_batch_tokens,
        turns=not hosted and turns(config, gpus=pool.on_gpus) != "off",
    )


def _replica_engines(config: RunConfig, pool: WorkerPool | InProcess) -> int:
    """Engines on a colocated replica's devices; 0 where they end together."""
    size = config.engine.tensor_parallel
    if config.devices.layout == "separate" or pool.transport is None:
        return 0
    return replica_size(config, len(pool.engines) * size) // size


def tensor_parallel_sizes(config: RunConfig, card: Card, nodes: Sequence[Node]) -> tuple[int, ...]:
    """Those that engines may have. Raises ``ValueError``."""
    return engine_sizes(config, decoding_devices(config, nodes), card.heads, card.kv_heads)


def total_steps(config: RunConfig, problems: Problems) -> int:
    """Steps of the whole run; racing may take a few more at an epoch's end."""
    per_epoch = sum(problems.source.quotas.values()) / config.rollout.prompts_per_step
    rounded = int(per_epoch) if config.data.drop_last else -int(-per_epoch // 1)
    return config.steps or max(1, rounded * config.epochs)
