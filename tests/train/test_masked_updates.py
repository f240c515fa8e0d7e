"""The updates of a step look at sampled tokens only, from rewards to ratios."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from gang import make_trainer
from test_algorithms import CONFIGS
from tiny_models import MAX_LENGTH, group_batch, make_model, with_environment

from rollpacker.config import DAPOConfig, GRPOConfig
from rollpacker.core import decisions as do
from rollpacker.core.types import GroupPart, PromptId, ReplicaId, Sample
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.step import StepRecord
from rollpacker.runtime.step.updates import Updates
from rollpacker.train.algorithms import build
from rollpacker.train.base import Update

MODEL = make_model()
SHAPED = CONFIGS | {"dapo_overlong": DAPOConfig(overlong_buffer=30, overlong_penalty=0.5)}
NOW = {"start_s": 0.0, "end_s": 0.0}


@dataclass
class _Done:
    """A graded attempt."""

    response: Sample

    @property
    def prompt(self) -> PromptId:
        return self.response.prompt

    def sample(self) -> Sample:
        return self.response


class _OneReplica:
    """Whose trainer does at once what it is told."""

    replicas = (ReplicaId(0),)

    def __init__(self, trainer):
        self.trainer = trainer
        self.scored = []
        self.trained = []

    def to_replica(self, replica, command):
        match command:
            case msg.Accumulate():
                self.trained += command.groups
                partial = self.trainer.accumulate(command.groups)
                report = msg.Accumulated(parts=command.parts, partial=partial, **NOW)
                self.updates.accumulated(replica, report)
            case msg.Score():
                self.scored += command.groups
                logprobs = self.trainer.score(command.groups)
                self.updates.scored(replica, msg.ScoredSamples(logprobs=logprobs, **NOW))
            case msg.Apply():
                update = self.trainer.apply(command.total)
                self.updates.applied(replica, msg.Applied(update=update, checksum=0, **NOW))


def _updates(workers, config, **options):
    updates = Updates(workers, build(config), max_length=MAX_LENGTH, clock=Clock(), **options)
    updates.begin(StepRecord(step=0, start_s=0.0), lambda _update, _last: None)
    return updates


def _accepted(groups, config, **options):
    """Advantages of a step with these groups."""
    updates = _updates(_OneReplica(None), config, **options)
    for group in groups:
        updates.accept([_Done(sample) for sample in group.samples])
    updates.rollout_over()
    return np.concatenate([group.advantages for group in updates.groups])


def _cut_off(groups, change=lambda sample: sample):
    """The same, every third response cut off."""

    def cut(sample):
        return change(replace(sample, finish_reason="stop" if sample.index % 3 else "length"))

    return [replace(g, samples=tuple(map(cut, g.samples))) for g in groups]


def _sampled_only(sample):
    chosen = slice(None) if sample.loss_mask is None else sample.loss_mask
    tokens, logprobs = sample.tokens[chosen], sample.logprobs[chosen]
    return replace(sample, tokens=tokens, logprobs=logprobs, loss_mask=None)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", SHAPED)
def test_advantages_are_those_of_responses_without_what_was_put_in(name, masked):
    groups = with_environment(group_batch(MODEL, SHAPED[name]))
    found = _accepted(_cut_off(groups), SHAPED[name], mask_truncated=masked)
    expected = _accepted(_cut_off(groups, _sampled_only), SHAPED[name], mask_truncated=masked)
    np.testing.assert_array_equal(found, expected)
    assert found.any()


@pytest.mark.parametrize("how", ["padded", "prompt_shared"])
@pytest.mark.parametrize("full_softmax", [False, True])
def test_ratios_of_later_updates_are_one_where_the_weights_stand_still(full_softmax, how):
    """The trainer's own log-probabilities are asked for where the sampler's are others."""
    off = 0.0 if full_softmax else 0.5
    groups = with_environment(group_batch(MODEL, GRPOConfig(), off=off))
    trainer = make_trainer(MODEL, updates_per_step=2, packing=how, learning_rate=1e-12)
    workers = _OneReplica(trainer)
    updates = workers.updates = _updates(workers, GRPOConfig(), sampler_is_old=full_softmax)
    for group in groups:
        updates.accept([_Done(sample) for sample in group.samples])
    updates.rollout_over()
    for number, half in enumerate((groups[:2], groups[2:])):
        parts = tuple(GroupPart(prompt=g.prompt, start=0, stop=4) for g in half)
        updates.accumulate(ReplicaId(0), parts)
        updates.apply(do.ApplyUpdate(step=0, update=number, last=number == 1))
    first, second = (update.metrics for update in updates._record.updates)
    assert second["trained_tokens/ratio"] == pytest.approx(1.0, abs=1e-4)
    assert second["clip_ratio/region_mean"] == 0.0
    assert (second["trained_tokens/abs_logprob_difference"] > 0.1) == (off > 0)
    assert "trained_tokens/ratio" in first
    assert sorted(g.prompt for g in workers.scored) == ([] if full_softmax else ["p2", "p3", "p4"])
    for sample in (s for g in workers.trained[2:4] for s in g.samples if s.sampled):
        assert sample.old_logprobs.shape == sample.tokens.shape
        if sample.loss_mask is not None:
            assert not sample.old_logprobs[~sample.loss_mask].any()


@pytest.mark.parametrize("name", SHAPED)
def test_a_reward_that_overflows_ends_the_run_by_its_name_and_prompt(name):
    groups = group_batch(MODEL, SHAPED[name])
    groups[1], huge = _with_reward(groups[1], 1e200)
    said = rf"the largest is 1e\+200, of prompt {huge} \(reward 'math': 1, reward 'mine': 1e\+200\)"
    with pytest.raises(ValueError, match=said):
        _accepted(groups, SHAPED[name])


def _with_reward(group, reward):
    first, *others = group.samples
    first = replace(first, reward=reward, rewards={"math": 1.0, "mine": reward})
    return replace(group, samples=(first, *others)), group.prompt


def test_updates_that_come_to_nothing_end_the_run_and_name_the_largest_reward():
    config = GRPOConfig()
    replica = _OneReplica(None)
    updates = replica.updates = _updates(replica, config, most_skipped=3)
    groups = group_batch(MODEL, config)
    groups[1], large = _with_reward(groups[1], -1e18)
    for group in groups:
        updates.accept([_Done(sample) for sample in group.samples])
    skipped = {"applied": False, "grad_norm": math.nan, "learning_rate": 0.1, "metrics": {}}
    said = f"3 updates in a row had a loss or gradient that is not finite.* of prompt {large} "
    for count in (1, 2, 3):
        update = Update(**skipped, skipped=count)
        updates._decision = do.ApplyUpdate(step=0, update=0, last=True)
        ends = pytest.raises(ValueError, match=said)
        with contextlib.nullcontext() if count < 3 else ends:
            updates.applied(ReplicaId(0), msg.Applied(update=update, checksum=0, **NOW))
