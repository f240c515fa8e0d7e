"""Two real processes over gloo hold the same weights, and those of a single one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gang import run
from test_fsdp import CORRECTED, KL, LORA, SHARED, follow_all
from tiny_models import MAX_LENGTH, group_batch, make_model, make_tokenizer

from rollpacker.config import GRPOConfig, TrainConfig
from rollpacker.train.trainer import Trainer

STEPS = 3
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def _steps(model):
    return [group_batch(model, GRPOConfig(), seed=s, count=6) for s in range(STEPS)]


def _trainer(model, world):
    config = TrainConfig(learning_rate=1e-3, beta=0.01)
    return Trainer(
        model, make_tokenizer(), config, temperature=1.0, max_length=MAX_LENGTH, world=world
    )


def _replica(rank, folder):
    for dtype in DTYPES:
        trainer = _trainer(make_model().to(dtype), dist.group.WORLD)
        for groups in _steps(make_model()):
            mine = groups[:1] if rank == 0 else groups[1:]
            partials = [None, None]
            dist.all_gather_object(partials, trainer.accumulate(mine))
            assert trainer.apply(partials[0] + partials[1]).applied
        if rank == 0:
            trainer.save(folder / str(dtype))
        torch.save(dict(trainer.weights()), folder / f"{dtype}-{rank}.pt")


def test_replicas_stay_bit_identical_and_equal_one_trainer(tmp_path):
    run(_replica, 2, tmp_path)
    for dtype, limit in DTYPES.items():
        zero, one = (torch.load(tmp_path / f"{dtype}-{rank}.pt") for rank in range(2))
        single = _trainer(make_model().to(dtype), None)
        for groups in _steps(make_model()):
            single.apply(single.accumulate(groups))
        for name, weight in single.weights():
            assert torch.equal(zero[name], one[name]), name
            apart = (weight.float() - zero[name].float()).norm() / weight.float().norm()
            assert apart < limit, name
        single.load(tmp_path / str(dtype))
        for name, weight in single.weights():
            assert torch.equal(weight, zero[name]), name


@pytest.mark.wide
def test_one_replica_over_two_processes_computes_what_one_trainer_does(tmp_path):
    """In small; ``test_fsdp`` has all of it."""
    run(follow_all, 2, tmp_path, 2, [KL | SHARED, LORA, CORRECTED], 2)
