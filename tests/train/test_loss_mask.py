"""What an environment put into a response is run, and not trained."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from gang import gradient, make_trainer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_algorithms import CONFIGS, GRADIENTS, plain_loss
from tiny_models import (
    MAX_LENGTH,
    clone,
    group_batch,
    make_model,
    mask,
    naive_logprobs,
    with_environment,
)

from rollpacker.config import DAPOConfig, GRPOConfig
from rollpacker.core import decisions as do
from rollpacker.core.types import GroupPart, PromptId, ReplicaId, Sample
from rollpacker.runtime.ipc.clock import Clock
from rollpacker.runtime.messages import messages as msg
from rollpacker.runtime.step.step import StepRecord
from rollpacker.runtime.step.updates import Updates
from rollpacker.train.algorithms import build
from rollpacker.train.base import Update
from rollpacker.train.model import packing
from rollpacker.train.model.forward import PackedForward
from rollpacker.train.model.packing import Costs, Item

PACKINGS = ("padded", "prompt_shared")
CPU = torch.device("cpu")
MODEL = make_model()
GROUPS = group_batch(MODEL, GRPOConfig(), count=2, size=3, off=0.3, old=True)
"""The second one has no advantages."""


def _changed(groups, change):
    """The groups with every sample changed."""
    return [replace(g, samples=tuple(map(change, g.samples))) for g in groups]


def _outcomes(*batches, **config):
    """Gradient, sums and scores of each batch, by one trainer: to make one costs more than they."""
    trainer, found = make_trainer(MODEL, **config), []
    for groups in batches:
        trainer.discard()
        partial = trainer.accumulate(groups)
        found.append((gradient(trainer).clone(), partial, trainer.score(groups)))
    return found


def _assert_same(one, two):
    """Bit for bit, but for the scores of tokens that were not sampled."""
    assert torch.equal(one[0], two[0])
    assert one[1] == two[1]
    assert one[2].keys() == two[2].keys()
    for sample, scores in one[2].items():
        np.testing.assert_array_equal(scores, two[2][sample])


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_mask_of_all_tokens_is_none(how, name):
    config = {"algorithm": CONFIGS[name], "packing": how, "beta": 0.1}
    everything = _changed(GROUPS, lambda s: replace(s, loss_mask=np.ones(len(s.tokens), bool)))
    _assert_same(*_outcomes(everything, GROUPS, **config))


@pytest.mark.parametrize("how", PACKINGS)
@pytest.mark.parametrize("name", GRADIENTS)
def test_logprobs_of_what_was_put_in_never_matter(how, name):
    def spoil(sample):
        if sample.loss_mask is None:
            return sample
        both = {"logprobs": sample.logprobs, "old_logprobs": sample.old_logprobs}
        values = {n: np.where(sample.loss_mask, v, np.float32("nan")) for n, v in both.items()}
        return replace(sample, **values)

    config = {"algorithm": CONFIGS[name], "packing": how, "beta": 0.1, "updates_per_step": 2}
    groups = with_environment(GROUPS)
    spoilt = _changed(groups, spoil)
    assert any(np.isnan(s.logprobs).any() for g in spoilt for s in g.samples)
    _assert_same(*_outcomes(spoilt, groups, **config))


@pytest.mark.parametrize("how", PACKINGS)
def test_metrics_are_means_over_sampled_tokens(how):
    groups = with_environment(GROUPS)
    trainer = make_trainer(MODEL, packing=how)
    metrics = trainer.apply(trainer.accumulate(groups)).metrics
    apart, ratios, entropies = [], [], []
    for sample in groups[0].samples:  # the other group is not run
        ids = torch.tensor(np.concatenate((sample.prompt_tokens, sample.tokens)))[None].long()
        with torch.no_grad():
            log_p = torch.log_softmax(MODEL(input_ids=ids).logits[0], -1)
        log_p = log_p[len(sample.prompt_tokens) - 1 : -1].numpy()
        own = log_p[np.arange(len(log_p)), sample.tokens] - sample.logprobs
        chosen = slice(None) if sample.loss_mask is None else sample.loss_mask
        apart.extend(abs(own[chosen]))
        ratios.extend(np.exp(own[chosen]))
        entropies.extend(-(np.exp(log_p) * log_p).sum(1)[chosen])
    assert len(apart) == sum(s.sampled for s in groups[0].samples)
    expected = {"abs_logprob_difference": apart, "ratio": ratios, "entropy": entropies}
    for name, values in expected.items():
        assert metrics[f"trained_tokens/{name}"] == pytest.approx(np.mean(values), rel=1e-4)


@pytest.mark.parametrize("how", PACKINGS)
def test_nothing_is_run_behind_the_last_sampled_token(how):
    def cut(sample):
        end = np.flatnonzero(sample.loss_mask)[-1] + 1
        names = ("tokens", "logprobs", "old_logprobs", "loss_mask")
        return replace(sample, **{name: getattr(sample, name)[:end] for name in names})

    places = [np.arange(len(s.tokens)) for g in GROUPS for s in g.samples]
    halves = iter([each < (len(each) + 1) // 2 for each in places])
    groups = _changed(GROUPS, lambda s: mask(s, next(halves)))
    short = _changed(groups, cut)
    assert sum(len(s.tokens) for s in short[0].samples) < sum(map(len, places[:3]))
    one, two = _outcomes(groups, short, packing=how)
    assert torch.equal(one[0], two[0])
    assert one[1] == two[1]
    for sample in short[0].samples:
        scores = one[2][sample.prompt, sample.index]
        own = two[2][sample.prompt, sample.index]
        np.testing.assert_array_equal(scores[: len(own)], own)
        assert not scores[len(own) :].any()
    items = [Item(s, 1.0, 0) for s in groups[0].samples]
    cells = sum(len(s.tokens) - 1 for s in short[0].samples)
    prompts = len(items[0].sample.prompt_tokens) * (1 if how == "prompt_shared" else len(items))
    built = packing.build(items, how == "prompt_shared", CPU)
    assert len(built.tokens) == prompts + cells


@pytest.mark.parametrize("how", ["prompt_shared", "auto"])
def test_each_response_stands_behind_its_own_prompt(how):
    """An environment may have put another one in place of its group's."""

    def other(sample):
        return replace(sample, prompt_tokens=sample.prompt_tokens[::-1][: 3 + sample.index % 2])

    groups = _changed(GROUPS, lambda s: s if s.index == 1 else other(s))
    first, second, third = (s.prompt_tokens.tobytes() for s in groups[0].samples)
    assert first == third != second
    (found,), (expected,) = _outcomes(groups, packing=how), _outcomes(groups, packing="padded")
    assert (found[0] - expected[0]).norm() < 1e-5 * expected[0].norm()
    for sample, scores in expected[2].items():
        np.testing.assert_allclose(found[2][sample], scores, atol=1e-5)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_responses_of_which_nothing_was_sampled_count_as_responses_only(name, beta):
    def silence(sample):
        return mask(sample, np.zeros(len(sample.tokens)))

    config = {"algorithm": CONFIGS[name], "beta": beta}
    groups = _changed(GROUPS, silence)
    trainer = make_trainer(clone(MODEL), **config)
    partial = trainer.accumulate(groups)
    assert (partial.tokens, partial.samples, partial.sums) == (0, 6, {})
    assert not gradient(trainer).any()
    assert trainer.score(groups) == {}
    update = trainer.apply(partial)
    assert update.applied
    assert not any(update.metrics.values())
    # One beside others changes nothing but the divisor.
    first = GROUPS[0]
    among = replace(first, samples=(silence(first.samples[0]), *first.samples[1:]))
    others = replace(first, samples=first.samples[1:], advantages=first.advantages[1:])
    one, two = _outcomes([among], [others], **config)
    _assert_same((one[0], one[1].sums, one[2]), (two[0], two[1].sums, two[2]))
    assert (one[1].tokens, one[1].samples) == (two[1].tokens, 3)


def test_scores_have_a_place_for_every_token_and_are_zero_where_none_was_sampled():
    groups = with_environment(group_batch(MODEL, GRPOConfig()))
    scores = make_trainer(MODEL).score(groups)
    sampled = [s for g in groups[:-1] for s in g.samples if s.sampled]
    assert len(scores) == len(sampled) < 16
    for sample in sampled:
        with torch.no_grad():
            wanted = naive_logprobs(MODEL, sample.prompt_tokens, sample.tokens).numpy()
        if sample.loss_mask is not None:
            wanted = wanted * sample.loss_mask
        found = scores[sample.prompt, sample.index]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        if sample.loss_mask is not None:
            assert not found[~sample.loss_mask].any()


def _one_group(masks, prompt, seed):
    """Responses to one prompt with these masks."""
    rng = np.random.default_rng(seed)
    begin = rng.integers(2, 23, prompt).astype(np.int32)
    samples = []
    for index, chosen in enumerate(masks):
        logprobs = -rng.random(len(chosen)).astype(np.float32) - 2
        sample = replace(
            GROUPS[0].samples[0],
            index=index,
            prompt_tokens=begin,
            tokens=rng.integers(1, 23, len(chosen)).astype(np.int32),
            logprobs=logprobs,
            old_logprobs=logprobs,
        )
        samples.append(mask(sample, chosen))
    advantages = rng.standard_normal(len(masks)).astype(np.float32)
    return replace(GROUPS[0], samples=tuple(samples), advantages=advantages)


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5)
HALF = settings(max_examples=settings().max_examples // 2)
BUDGETS = st.sampled_from([1, 20, 1000])


@HALF
@given(MASKS, st.integers(1, 6), BUDGETS, st.integers(0, 99))
def test_any_mask_chooses_among_the_logprobs_of_whole_responses(masks, prompt, budget, seed):
    group = _one_group(masks, prompt, seed)
    items = [Item(s, 1.0, 0) for s in group.samples if s.sampled]
    for how in PACKINGS:
        plans, shared = packing.plan(items, budget, how, Costs(1.0, 1.0))
        assert sorted(id(i) for plan in plans for i in plan) == sorted(map(id, items))
        for plan in plans:
            _check_batch(plan, packing.build(plan, shared, CPU))


def _check_batch(plan, batch):
    """Everything of a token is of a sampled one."""
    with torch.no_grad():
        found, _ = PackedForward(MODEL).logprobs(batch, 1.0)
        whole = [naive_logprobs(MODEL, i.sample.prompt_tokens, i.sample.tokens) for i in plan]
    chosen = [i.sample.loss_mask for i in plan]
    expected = torch.cat([each[torch.from_numpy(m)] for each, m in zip(whole, chosen, strict=True)])
    torch.testing.assert_close(found, expected, atol=4e-5, rtol=1e-5)
    lengths = [int(m.sum()) for m in chosen]
    assert batch.lengths.tolist() == lengths
    assert batch.owner.tolist() == np.repeat(np.arange(len(plan)), lengths).tolist()
    for name in ("sampler_logprobs", "old_logprobs"):
        own = [getattr(i.sample, name.removeprefix("sampler_")) for i in plan]
        own = np.concatenate([each[m] for each, m in zip(own, chosen, strict=True)])
        assert getattr(batch, name).tolist() == own.tolist()


@HALF
@given(MASKS, st.sampled_from(sorted(CONFIGS)), st.sampled_from(PACKINGS), BUDGETS)
def test_any_mask_gives_the_gradient_of_the_plain_formula(masks, name, how, budget):
    group = _one_group(masks, prompt=3, seed=len(masks))
    config = {"algorithm": CONFIGS[name], "updates_per_step": 2, "packing": how}
    trainer = make_trainer(MODEL, micro_batch_tokens=budget, **config)
    partial = trainer.accumulate([group])
    found = gradient(trainer)
    if not partial.tokens:
        assert not found.any()
        return
    plain = clone(MODEL)
    # Beside itself as the reference the KL term has no gradient.
    plain_loss(name, CONFIGS[name], plain, plain, [group], 2).backward()
    wanted = torch.cat([p.grad.flatten() for p in plain.parameters()])
    assert (found / partial.normaliser - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9


# The updates of a step look at sampled tokens only, from rewards to ratios.


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
    updates.begin(StepRecord(step=0, start_s=0.0), lambda _event: None)
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
        updates.perform(do.AccumulateGradients(replica=ReplicaId(0), parts=parts))
        updates.perform(do.ApplyUpdate(step=0, update=number, last=number == 1))
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
