"""Builds a job's parts from its configuration: the one place that knows them all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import yaml

from rollpacker.config import DataConfig, EvalConfig, MiniEngineConfig, RunConfig
from rollpacker.core.types import Prompt
from rollpacker.data.encode import encode_prompts
from rollpacker.data.load import load_rows
from rollpacker.data.source import PromptSource
from rollpacker.engine.base import SamplingParams
from rollpacker.job.resume import Start
from rollpacker.policy.machine import single_devices
from rollpacker.policy.rollout import RolloutPolicy
from rollpacker.policy.settings import RolloutSettings, asynchronous_grading, streaming_rules
from rollpacker.runtime.clock import Clock
from rollpacker.runtime.durable import replace_file
from rollpacker.runtime.evaluate import Evaluator
from rollpacker.runtime.phases import Phases
from rollpacker.runtime.pool import WorkerPool
from rollpacker.runtime.problems import Problems
from rollpacker.runtime.progress import Progress
from rollpacker.runtime.rewards import Rewards, check_rows
from rollpacker.runtime.rollout import Rollout
from rollpacker.runtime.run_log import RunLog
from rollpacker.runtime.updates import Updates
from rollpacker.train import algorithms
from rollpacker.train.card import Card, read_card

_MIN_RESPONSE = 16
"""Tokens that a prompt must leave for its response when no length is configured."""


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a job is made of."""

    pool: WorkerPool
    problems: Problems
    rewards: Rewards
    policy: RolloutPolicy
    settings: RolloutSettings
    rollout: Rollout
    updates: Updates
    log: RunLog
    clock: Clock
    evaluator: Evaluator | None = None

    def close(self) -> None:
        """End all processes and close all files."""
        self.rewards.close()
        self.pool.close()
        self.log.progress.close()
        self.log.close()


async def build(
    config: RunConfig, folder: Path, progress: Progress, start: Start, phases: Phases | None
) -> Parts:
    """Build everything. Raises ``ValueError`` for the user's mistakes, before any work is lost."""
    check(config)
    card = read_card(config.model)
    problems = load_problems(config, config.data, card, progress)
    held_out = load_problems(config, config.eval.data, card, progress) if config.eval else None
    cap = max_completion_length(config, card, problems)
    check_size(config, problems)
    check_rows(
        config.rewards, [*problems.rows.values(), *(held_out.rows.values() if held_out else ())]
    )
    rewards = Rewards(
        config.rewards, config.grading, card.tokenizer, deterministic=config.deterministic
    )
    updates = total_steps(config, problems) * config.train.updates_per_step
    pool = WorkerPool(config, max_length=cap, total_updates=updates)
    try:
        for warning in rewards.start(asyncio.get_running_loop()):
            progress.note(warning)
        await pool.start()
    except BaseException:
        rewards.close()
        pool.close()
        raise
    save_config(config, folder)
    clock = Clock(0.0 if start.state is None else start.state["clock_s"])
    log = RunLog(folder, config, last_step=start.step - 1, max_length=cap, progress=progress)
    params = sampling_params(config, card, cap)
    parts = assemble(config, cap, pool, problems, rewards, params, log, clock, phases)
    if config.eval is not None and held_out is not None:
        parts.evaluator = Evaluator(
            config.eval,
            config.seed,
            problems=held_out,
            pool=pool,
            rewards=rewards,
            params=evaluation_params(params, config.eval),
            clock=clock,
            progress=progress,
        )
    return parts


def assemble(
    config: RunConfig,
    cap: int,
    pool: WorkerPool,
    problems: Problems,
    rewards: Rewards,
    params: SamplingParams,
    log: RunLog,
    clock: Clock,
    phases: Phases | None,
) -> Parts:
    """The policy and its driver over started processes."""
    settings = rollout_settings(config, problems, pool, cap)
    policy = RolloutPolicy(settings)
    censoring = config.rollout.tail_batching.censoring_weights
    updates = Updates(
        pool,
        algorithms.build(config.train.algorithm),
        max_length=cap,
        clock=clock,
        weigh=policy.censoring_weights if censoring else None,
    )
    rollout = Rollout(
        config,
        policy,
        pool=pool,
        problems=problems,
        rewards=rewards,
        updates=updates,
        params=params,
        journal=log.journal,
        graded=log.graded,
        clock=clock,
        phases=phases,
    )
    return Parts(
        pool=pool,
        problems=problems,
        rewards=rewards,
        policy=policy,
        settings=settings,
        rollout=rollout,
        updates=updates,
        log=log,
        clock=clock,
    )


def save_config(config: RunConfig, folder: Path) -> None:
    """Write the resolved configuration."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    replace_file(folder / "config.yaml", text.encode())


def races(config: RunConfig) -> bool:
    """Whether a round keeps the first to finish."""
    return config.rollout.tail_batching.mode in ("race", "prompts", "auto")


def check(config: RunConfig) -> None:
    """Refuse combinations that cannot work. Raises ``ValueError``."""
    mode = config.rollout.tail_batching.mode
    if races(config) and config.grading.asynchronous is False:
        raise ValueError(
            f"grading.asynchronous=false cannot work with rollout.tail_batching.mode={mode}: "
            "a race needs each reward when its response ends; use mode 'exact' or 'off'"
        )
    if mode in ("race", "auto") and any(reward.needs_group for reward in config.rewards):
        raise ValueError(
            "a reward with needs_group compares all responses of a prompt, which "
            f"rollout.tail_batching.mode={mode} may abort; use 'exact', 'off' or 'prompts'"
        )
    if config.rollout.tail_batching.long_round_steps > 1 and config.train.updates_per_step > 1:
        raise ValueError(
            "rollout.tail_batching.long_round_steps and train.updates_per_step both split a round "
            "into updates: leave one of them at 1"
        )
    if config.rollout.planner != "off":
        raise ValueError(
            "rollout.planner is for engines that span several devices, which runs do not have "
            "yet: try it with 'rollpacker simulate', or leave it at 'off'"
        )
    if config.rollout.tail_batching.censoring_weights and mode != "prompts":
        raise ValueError(
            "rollout.tail_batching.censoring_weights over-corrects where responses race; "
            "it is offered for mode 'prompts' only"
        )


def check_size(config: RunConfig, problems: Problems) -> None:
    """Raise ``ValueError`` when ``drop_last`` would drop everything."""
    if config.data.drop_last and len(problems.tokens) < config.rollout.prompts_per_step:
        raise ValueError(
            f"data.drop_last drops everything: {len(problems.tokens)} prompts are fewer than "
            f"rollout.prompts_per_step={config.rollout.prompts_per_step}"
        )


def load_problems(config: RunConfig, data: DataConfig, card: Card, progress: Progress) -> Problems:
    """Read, encode and order a data set. Raises ``ValueError``."""
    loaded = load_rows(data)
    progress.note(loaded.mapping)
    encoded = encode_prompts(
        loaded.rows,
        card.tokenizer,
        data,
        card.context,
        min(config.rollout.max_completion_length or _MIN_RESPONSE, card.context - 1),
        config.model.chat_template_kwargs,
    )
    if encoded.skipped:
        progress.note(f"{len(encoded.skipped)} prompts are too long and skipped (data.overlong)")
    rows = [row for row in loaded.rows if row.id in encoded.tokens]
    prompts = [Prompt(id=r.id, domain=r.domain, tokens=len(encoded.tokens[r.id])) for r in rows]
    return Problems(rows, encoded.tokens, PromptSource(prompts, config.seed, data.shuffle))


def max_completion_length(config: RunConfig, card: Card, problems: Problems) -> int:
    """The configured longest response, or what the longest prompt leaves of the context."""
    longest = max(len(tokens) for tokens in problems.tokens.values())
    return config.rollout.max_completion_length or card.context - longest


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
    config: RunConfig, problems: Problems, pool: WorkerPool, cap: int
) -> RolloutSettings:
    """What the policy is told of this run."""
    algorithm = algorithms.build(config.train.algorithm)
    whole_batch = (
        algorithm.needs_batch
        or config.train.updates_per_step > 1
        or config.rollout.tail_batching.censoring_weights
    )
    machine = None
    if config.rollout.streaming.scaling != "consolidate":
        machine = single_devices(
            len(pool.workers), kv_tokens=kv_tokens(config, problems, cap), latency=pool.latency
        )
    return RolloutSettings(
        rollout=config.rollout,
        seed=config.seed,
        sizes=dict(problems.source.quotas),
        cap=cap,
        latency=pool.latency,
        asynchronous_grading=asynchronous_grading(config.rollout, config.grading.asynchronous),
        rules=streaming_rules(
            config.rollout,
            latency=pool.latency,
            workers=len(pool.workers),
            whole_batch=whole_batch,
            ordered=config.deterministic,
            updates=config.train.updates_per_step,
            train_all=config.train.beta > 0,
            machine=machine,
            # Whoever finishes first wins a race: with others on the nodes, that may be others.
            shared=bool(config.mux.url) and not (config.deterministic and races(config)),
        ),
        machine=machine,
    )


def kv_tokens(config: RunConfig, problems: Problems, cap: int) -> int:
    """KV tokens that an engine was sized for."""
    engine = config.engine
    given, running = (
        (engine.kv_tokens, engine.max_running) if isinstance(engine, MiniEngineConfig) else (0, 256)
    )
    return given or running * (cap + max(len(tokens) for tokens in problems.tokens.values()))


def total_steps(config: RunConfig, problems: Problems) -> int:
    """Steps of the whole run; racing may take a few more at an epoch's end."""
    per_epoch = sum(problems.source.quotas.values()) / config.rollout.prompts_per_step
    rounded = int(per_epoch) if config.data.drop_last else -int(-per_epoch // 1)
    return config.steps or max(1, rounded * config.epochs)
