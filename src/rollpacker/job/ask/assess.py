"""Accuracy of any checkpoint on a configuration's held-out problems; nothing is trained."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

from rollpacker.config import RewardConfig, RunConfig, TrainConfig, longest_response
from rollpacker.core.types import PromptId
from rollpacker.job.ask.at_k import GradedAnswer, ks, maj_at, pass_at
from rollpacker.job.plan.build import evaluation_params, max_completion_length, sampling_params
from rollpacker.job.plan.checks import check_ends, check_engine
from rollpacker.job.plan.emulated import check_emulated
from rollpacker.job.plan.environments import Environments, environments_of
from rollpacker.job.plan.gpu_job import with_gpu_defaults
from rollpacker.job.plan.nodes import nodes_of
from rollpacker.job.plan.problems import load_held_out
from rollpacker.reward.functions import voting
from rollpacker.runtime.attempts.rewards import Rewards, check_rows
from rollpacker.runtime.evaluate import Evaluator
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages.breaker import Breaker
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.publishing import publish
from rollpacker.train.model.card import Card, read_card


def assess(
    config: RunConfig, checkpoint: str, generations: int | None, progress: Progress
) -> dict[str, Any]:
    """Answer every held-out problem with a checkpoint, by the workers and rewards of ``config``.

    Args:
        config: of a run; its model gives way to the checkpoint.
        checkpoint: folder or hub name.
        generations: answers to each problem; default: ``eval.num_generations``.
        progress: shows how far it is.

    Returns:
        ``accuracy, pass_at, maj_at, problems, mean_length`` and what they rest on. With the
        settings of a run, ``accuracy`` is what the run measured with the same weights, if its
        ``rollout.max_completion_length`` is set (by default it follows the longest prompt).

    Raises ``ValueError`` for the user's mistakes and ``WorkerError`` when a worker dies.
    """
    return asyncio.run(_assess(_without_training(config, checkpoint, generations), progress))


def _without_training(config: RunConfig, checkpoint: str, generations: int | None) -> RunConfig:
    if config.eval is None:
        raise ValueError(
            "eval.data is missing: the config names no held-out problems, nor an eval.fraction"
        )
    check_emulated(config)
    count = generations or config.eval.num_generations
    if count > 1 and config.eval.temperature == 0.0:
        raise ValueError(
            f"eval.temperature=0 gives the same answer {count} times: raise it, or take one answer"
        )
    changes = {
        # What is saved of a LoRA run has its adapters merged.
        "model": config.model.model_copy(update={"path": checkpoint, "lora_rank": 0}),
        "train": TrainConfig(),
        "eval": config.eval.model_copy(update={"num_generations": count}),
    }
    return config.model_copy(update=changes)


async def _assess(config: RunConfig, progress: Progress) -> dict[str, Any]:
    config = with_gpu_defaults(config, progress)
    card = read_card(config.model)
    check_engine(config, card.kind)
    environments = environments_of(config, card, progress)
    try:
        return await Breaker().run(_answer(config, card, environments, progress))
    finally:
        environments.close()


async def _answer(
    config: RunConfig, card: Card, environments: Environments, progress: Progress
) -> dict[str, Any]:
    assert config.eval is not None
    problems = load_held_out(config, card, progress, environments.tools)
    cap = max_completion_length(config, card, problems)
    domains = {row.domain for row in problems.rows.values()}
    for line in check_ends(config, card):
        progress.note(line)
    used = [_within(each, domains) for each in config.rewards if any(map(each.applies, domains))]
    check_rows(used, problems.rows.values())
    rewards = Rewards(
        used,
        config.grading,
        card.read,
        rows=problems.rows.values(),
        deterministic=config.deterministic,
        environment=config.environment,
    )
    longest = longest_response(config.environment, cap)
    nodes, note = nodes_of(config), progress.note
    pool = WorkerPool(config, max_length=longest, total_updates=0, nodes=nodes, note=note)
    clock = Clock(0.0)
    loop = asyncio.get_running_loop()
    try:
        for warning in rewards.start(loop):
            progress.note(warning)
        await pool.start()
        evaluator = Evaluator(
            config.eval,
            config.seed,
            problems=problems,
            workers=pool,
            rewards=rewards,
            params=evaluation_params(sampling_params(config, card, cap), config.eval),
            clock=clock,
            progress=progress,
            episodes=environments.episodes(cap, pool.info.max_length, clock),
            retries=config.rollout.max_retries,
        )
        await publish(pool, 0)
        metrics = await evaluator.run(0)
    finally:
        rewards.close()
        pool.close()
    return _result(config, evaluator, metrics, card)


def _within(reward: RewardConfig, domains: set[str]) -> RewardConfig:
    """Without the domains that no held-out problem is of."""
    return reward.model_copy(update={"domains": [d for d in reward.domains if d in domains]})


def _result(
    config: RunConfig, evaluator: Evaluator, metrics: dict[str, float], card: Card
) -> dict[str, Any]:
    assert config.eval is not None
    counted_by, vote = voting(config.rewards)
    answers: dict[PromptId, list[GradedAnswer]] = defaultdict(list)
    for attempt in evaluator.graded():
        assert attempt.output is not None
        text = card.read(attempt.output.tokens.tolist())
        answers[attempt.prompt].append(
            GradedAnswer(vote=vote(text), right=evaluator.is_right(attempt))
        )
    pass_k: dict[int, float | None] = {}
    maj_k: dict[int, float | None] = {}
    for k in ks(config.eval.num_generations):
        # A problem where a reward failed may have fewer answers.
        enough = [each for each in answers.values() if len(each) >= k]
        pass_k[k] = _mean([pass_at(k, [a.right for a in each]) for each in enough])
        maj_k[k] = _mean([maj_at(k, each) for each in enough])
    return {
        "checkpoint": config.model.path,
        "accuracy": metrics["eval/sampled_accuracy"],
        "pass_at": pass_k,
        "maj_at": maj_k,
        "votes_by": counted_by,
        "problems": int(metrics["eval/problems"]),
        "num_generations": config.eval.num_generations,
        "ungraded": int(metrics["eval/ungraded"]),
        "mean_length": metrics["eval/sampled_mean_length"],
        "clipped_ratio": metrics["eval/sampled_clipped_ratio"],
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
