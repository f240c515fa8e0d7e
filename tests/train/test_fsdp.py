"""Replicas over several real processes compute what one process does."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gang import TIMEOUT, Place, apart, gradient, held, make_trainer, over_replicas, place, run
from test_algorithms import CONFIGS
from tiny_models import group_batch, make_model, with_environment

from rollpacker.config import GRPOConfig, SamplerCorrectionConfig
from rollpacker.train.mesh import meet
from waiting import until

pytestmark = pytest.mark.slow

KL = {"beta": 0.1, "gradient_checkpointing": True}
SHARED = {"packing": "prompt_shared", "micro_batch_tokens": 60}
LORA = {"rank": 3, "beta": 0.1}
CORRECTED = {
    "sampler_correction": SamplerCorrectionConfig(kind="mask", level="sequence", high=1.2),
    "micro_batch_tokens": 60,
}
OTHERS = [
    KL,
    SHARED,
    LORA,
    {"packing": "padded", "micro_batch_tokens": 10_000, "max_grad_norm": 0.01},
    {"mask_truncated_completions": True, "weight_decay": 0.1},
    {"rank": 2, "gradient_checkpointing": True, **SHARED},
    {"rank": 1, "learning_rate": 1e-2},
    CORRECTED,
]


def _batch(settings, model):
    """Groups of responses of which some were cut off, and most went through an environment; their
    old log-probabilities are the sampler's where nothing is corrected."""
    algorithm, old = settings.get("algorithm", GRPOConfig()), "sampler_correction" not in settings
    return [
        replace(
            g,
            samples=tuple(
                replace(s, finish_reason="length" if s.index == 1 else "stop") for s in g.samples
            ),
        )
        for g in with_environment(group_batch(model, algorithm, off=0.1, old=old))
    ]


def _mine(here, groups):
    """This replica's groups in the pieces in which they come, not as many as another's."""
    if here.peers is None:
        return [groups[:1], groups[1:4], groups[4:]]
    return [groups[:1]] if dist.get_rank(here.peers) == 0 else [groups[1:2], groups[2:]]


def _total(here, partials):
    """The sum over pieces and replicas, after every member has said the same."""
    everywhere = [None] * here.members.size()
    dist.all_gather_object(everywhere, partials, group=here.members)
    assert all(each == partials for each in everywhere)
    parts = [p for each in over_replicas(here, partials) for p in each]
    return sum(parts[1:], start=parts[0])


def _assert_same_sums(found, expected):
    for name in ("normaliser", "tokens", "samples"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.sums.keys() == expected.sums.keys()
    for key, value in expected.sums.items():
        assert found.sums[key] == pytest.approx(value, rel=1e-4, abs=1e-3), key
    assert found.ranges.keys() == expected.ranges.keys()
    for key, ends in expected.ranges.items():
        assert found.ranges[key] == pytest.approx(ends, rel=1e-4), key


def _follow(here, settings, steps):
    """Both trainers take the same steps."""
    model = make_model("qwen3")
    groups = _batch(settings, model)
    local, trainer = make_trainer(model, **settings), make_trainer(model, here, **settings)
    first = held(local)
    for _ in range(steps):
        expected = local.accumulate(groups)
        total = _total(here, [trainer.accumulate(each) for each in _mine(here, groups)])
        _assert_same_sums(total, expected)
        found, wanted = sum(over_replicas(here, gradient(trainer))), gradient(local)
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()  # GSPO may clip all of it
        one, two = trainer.apply(total), local.apply(expected)
        assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-5)
        assert one.learning_rate == two.learning_rate
        assert one.metrics == pytest.approx(two.metrics, rel=1e-4, abs=1e-6)
        _assert_moved_alike(first, held(trainer), held(local))
        assert not gradient(trainer).any()
    _assert_replicas_agree(here, trainer)
    _assert_same_scores(trainer.score(groups), local.score(groups))


def _assert_moved_alike(first, found, wanted):
    assert apart(found, wanted) < 5e-6
    moved, expected = ({n: w[n] - first[n] for n in first} for w in (found, wanted))
    assert apart(moved, expected) < 1e-4


def _assert_replicas_agree(here, trainer):
    first, *rest = over_replicas(here, (trainer.checksum(), held(trainer)))
    for checksum, weights in rest:
        assert checksum == first[0]
        assert all(torch.equal(weights[name], first[1][name]) for name in first[1])


def _assert_same_scores(found, expected):
    assert found.keys() == expected.keys()
    assert expected
    for sample, logprobs in expected.items():
        np.testing.assert_allclose(found[sample], logprobs, atol=5e-5)


def follow_all(rank, folder, shard, cases, steps):
    """A spread trainer and one of one process take ``steps`` steps with each of some settings."""
    here = place(shard)
    for settings in cases:
        _follow(here, settings, steps)


@pytest.mark.parametrize(("world", "shard"), [(2, 1), (2, 2), (4, 2), (4, 4)])
def test_all_algorithms_and_settings_over_shards_and_replicas(world, shard, tmp_path):
    cases = [{"algorithm": config} for config in CONFIGS.values()] + OTHERS
    run(follow_all, world, tmp_path, shard, cases, 3)


def _half(rank, folder):
    here = place(2)
    model = make_model("qwen3")
    groups = group_batch(model, GRPOConfig(), off=0.1)
    for settings in ({"beta": 0.1}, {"rank": 2}):
        local = make_trainer(model.bfloat16(), **settings)
        trainer = make_trainer(model.bfloat16(), here, **settings)
        for _ in range(3):
            expected, found = local.accumulate(groups), trainer.accumulate(groups)
            assert found.sums["entropy"] == pytest.approx(expected.sums["entropy"], rel=1e-2)
            one, two = trainer.apply(found), local.apply(expected)
            assert one.grad_norm == pytest.approx(two.grad_norm, rel=3e-2)
        assert apart(held(trainer), held(local)) < 1e-2
        assert all(weight.dtype == torch.bfloat16 for weight in held(trainer).values())
        assert all(m.dtype == torch.float32 for m in trainer._optimizer.state()["master"].values())


def test_bfloat16_models_keep_float32_masters(tmp_path):
    run(_half, 2, tmp_path)


def _skip(rank, folder):
    here = place(2)
    model = make_model()
    groups = group_batch(model, GRPOConfig())
    trainer = make_trainer(model, here)
    before = trainer.checksum()
    partial = trainer.accumulate(groups)
    if rank == 1:
        trainer._optimizer.sums[3] = float("nan")
    assert not trainer.apply(partial).applied
    assert trainer.checksum() == before
    trainer.accumulate(groups)
    trainer.discard()
    assert trainer.apply(trainer.accumulate(groups)).applied
    assert trainer.checksum() != before
    fresh = make_trainer(model, here)
    fresh.apply(fresh.accumulate(groups))
    assert trainer.checksum() == fresh.checksum()


def test_one_members_nan_skips_the_update_of_all(tmp_path):
    run(_skip, 2, tmp_path)


def _wait_for_others(rank, folder):
    """A replica sums all its gradients while the other has not begun."""
    here = place(1)
    model = make_model()
    groups = group_batch(model, GRPOConfig())
    trainer = make_trainer(model, here)
    done = folder / "done"
    if rank == 0:
        trainer.accumulate(groups)
        done.touch()
    until(done.exists)
    partial = trainer.accumulate(groups[:1])
    assert trainer.apply(partial).applied


def test_replicas_do_not_wait_for_each_other_before_the_update(tmp_path):
    run(_wait_for_others, 2, tmp_path)


def _stay_away(rank, folder):
    here = place(2, timedelta(seconds=2))
    model = make_model()
    trainer = make_trainer(model, here)
    gone = folder / "gone"
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"(?i)time.?d? ?out"):
            trainer.accumulate(group_batch(model, GRPOConfig()))
        gone.touch()
    until(gone.exists)


def test_a_member_that_stays_away_is_an_error_after_the_groups_timeout(tmp_path):
    run(_stay_away, 2, tmp_path)


def _lose_a_replica(rank, folder):
    """Replicas of two processes each; the second loses one of them, and is not replaced."""
    # The groups within a replica know no other.
    dist.destroy_process_group()
    replica, index = divmod(rank, 2)
    own = dist.FileStore(str(folder / f"replica-{replica}"), 2)
    dist.init_process_group("gloo", store=own, rank=index, world_size=2, timeout=TIMEOUT)
    cpu = torch.device("cpu")
    meeting = str(folder / f"peers-{index}")
    world = meet(meeting, replica, 2, TIMEOUT, cpu)
    model = make_model()
    groups = group_batch(model, GRPOConfig())
    local = make_trainer(model)
    trainer = make_trainer(model, Place(dist.group.WORLD, world))
    local.apply(local.accumulate(groups))
    trainer.accumulate(groups[replica::2])
    total = make_trainer(model).accumulate(groups)
    assert trainer.apply(total).applied
    trainer.accumulate(groups[:2])
    if rank == 3:
        return
    # The first of each replica do reach each other.
    reason = r"another process" if rank == 0 else r"(?i)connection|closed|reset"
    with pytest.raises(RuntimeError, match=reason):
        trainer.apply(total)
    if replica == 1:
        return
    trainer.discard()
    trainer.world = meet(meeting, 0, 1, TIMEOUT, cpu)
    trainer.apply(trainer.accumulate(groups))
    local.apply(local.accumulate(groups))
    assert apart(held(trainer), held(local)) < 5e-6


def test_a_replica_goes_on_when_another_is_lost(tmp_path):
    run(_lose_a_replica, 4, tmp_path)
