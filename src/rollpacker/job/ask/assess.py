"""Accuracy of a checkpoint on a configuration's held-out problems, without training."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rollpacker.config import RewardConfig, RunConfig, TrainConfig, longest_response
from rollpacker.core.types import PromptId
from rollpacker.job.plan.build import (
    evaluator_of,
    max_completion_length,
    nodes_of,
    rewards_of,
    sampling_params,
    start_all,
)
from rollpacker.job.plan.checks import check_ends, check_engine
from rollpacker.job.plan.defaults import with_gpu_defaults
from rollpacker.job.plan.emulated import check_emulated
from rollpacker.job.plan.problems import Environments, environments_of, load_held_out
from rollpacker.reward.functions import voting
from rollpacker.runtime.evaluate import Evaluator
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages.faults import Breaker
from rollpacker.runtime.pool.pool import WorkerPool
from rollpacker.runtime.record.progress import Progress
from rollpacker.runtime.step.publishing import publish
from rollpacker.runtime.step.responses import Setup
from rollpacker.train.model.loading import Card, read_card

_EXACT = 2000
_DRAWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedAnswer:
    """One graded answer. Equal answers have the same ``vote``."""

    vote: str
    right: bool


def ks(count: int) -> list[int]:
    """The k to report for ``count`` answers: powers of two, and all."""
    powers = itertools.takewhile(lambda k: k < count, (2**i for i in itertools.count()))
    return [*powers, count]


def pass_at(k: int, right: Sequence[bool]) -> float:
    """The probability that one of k answers, drawn without replacement, is right. The unbiased
    estimator of Chen et al. (2021), "Evaluating Large Language Models Trained on Code"."""
    wrong = len(right) - sum(right)
    return 1.0 - math.comb(wrong, k) / math.comb(len(right), k)


def maj_at(k: int, answers: Sequence[GradedAnswer]) -> float:
    """The probability that the most frequent of k answers, drawn without replacement, is right.
    Self-consistency (Wang et al., 2022). Ties share. If there are many ways to draw k, it is the
    mean of 1,000 draws with a fixed seed."""
    if math.comb(len(answers), k) <= _EXACT:
        draws: Iterable[Sequence[GradedAnswer]] = itertools.combinations(answers, k)
    else:
        rng = random.Random(0)
        draws = (rng.sample(answers, k) for _ in range(_DRAWS))
    results = [_elected(draw) for draw in draws]
    return sum(results) / len(results)


def _elected(answers: Sequence[GradedAnswer]) -> float:
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer in answers:
        votes[answer.vote].append(answer.right)
    most = max(len(right) for right in votes.values())
    winners = [sum(right) / most for right in votes.values() if len(right) == most]
    return sum(winners) / len(winners)


def assess(
    config: RunConfig, checkpoint: str, generations: int | None, progress: Progress
) -> dict[str, Any]:
    """Answer every held-out problem with a checkpoint, by the workers and rewards of ``config``.

    If the settings are a run's and its ``rollout.max_completion_length`` is set, ``accuracy`` is
    the run's own for the same weights. (By default that key follows the longest prompt.)

    Args:
        config: a run's. Its model is replaced by the checkpoint.
        checkpoint: folder or hub name.
        generations: answers to each problem. None: ``eval.num_generations``.

    Raises ``ValueError`` for the user's mistakes and ``WorkerError`` if a worker dies.
    """
    return asyncio.run(_assess(_without_training(config, checkpoint, generations), progress))


def _without_training(config: RunConfig, checkpoint: str, generations: int | None) -> RunConfig:
    if config.eval is None:
        raise ValueError(
            "eval.data is missing: the config has neither held-out problems nor an eval.fraction"
        )
    check_emulated(config)
    count = generations or config.eval.num_generations
    if count > 1 and config.eval.temperature == 0.0:
        raise ValueError(
            f"eval.temperature=0 gives the same answer {count} times: raise it, or take one answer"
        )
    changes = {
        # The checkpoint of a LoRA run has its adapters merged.
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
    rows = [*problems.rows.values()]
    domains = {row.domain for row in rows}
    for line in check_ends(config, card):
        progress.note(line)
    used = [_within(each, domains) for each in config.rewards if any(map(each.applies, domains))]
    rewards = rewards_of(config, used, card, rows)
    longest = longest_response(config.environment, cap)
    nodes, note = nodes_of(config), progress.note
    pool = WorkerPool(config, max_length=longest, total_updates=0, nodes=nodes, note=note)
    clock = Clock(0.0)
    try:
        await start_all(pool, rewards, note)
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
        evaluator = evaluator_of(config, problems, setup, progress)
        await publish(pool, 0)
        metrics = await evaluator.run(0)
    finally:
        rewards.close()
        pool.close()
    return _result(config, evaluator, metrics, card)


def _within(reward: RewardConfig, domains: set[str]) -> RewardConfig:
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
        # A problem may have fewer answers if a reward failed.
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
