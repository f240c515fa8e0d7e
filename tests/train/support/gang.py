"""Real processes over gloo that hold replicas together, and a trainer of one process to compare."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_models import MAX_LENGTH, clone, make_tokenizer

from rollpacker.config import ModelConfig, TrainConfig
from rollpacker.runtime.cluster.nodes import PRELOADED
from rollpacker.train.fsdp import FSDPTrainer
from rollpacker.train.trainer import Trainer

TIMEOUT = datetime.timedelta(seconds=120)


def run(case, world, folder, *arguments):
    """Call ``case(rank, folder, *arguments)`` in ``world`` processes of one group: in this one
    where that is all."""
    folder.mkdir(exist_ok=True)
    if world == 1:
        _process(0, case, world, folder, arguments)
        return
    # One process imports what all need.
    mp.get_context("forkserver").set_forkserver_preload([*PRELOADED, "rollpacker.train.fsdp"])
    mp.start_processes(
        _process, (case, world, folder, arguments), nprocs=world, start_method="forkserver"
    )


def _process(rank, case, world, folder, arguments):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        case(rank, folder, *arguments)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Place:
    """Where a process stands: its replica's processes, and the same ones of other replicas."""

    members: dist.ProcessGroup
    peers: dist.ProcessGroup | None


def place(shard, timeout=TIMEOUT):
    """Replicas of ``shard`` neighbouring ranks; all ranks form all groups, in one order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [list(range(first, first + shard)) for first in range(0, world, shard)]
    columns = [list(range(index, world, shard)) for index in range(shard)]
    members = [dist.new_group(ranks, timeout=timeout) for ranks in rows][rank // shard]
    peers = [dist.new_group(ranks, timeout=timeout) for ranks in columns][rank % shard]
    return Place(members, peers if len(rows) > 1 else None)


def make_trainer(model, place=None, *, rank=0, **settings):
    """A trainer over a copy of ``model``; of one process without a place.

    Adam's epsilon is 1e-6: at 1e-8 the first steps have the size of the rate whatever the gradient,
    so rounding would show as a different sign.
    """
    config = TrainConfig(**({"learning_rate": 1e-3, "micro_batch_tokens": 100} | settings))
    options = {
        "temperature": 1.0,
        "max_length": MAX_LENGTH,
        "total_updates": 10,
        "lora": ModelConfig(path=".", lora_rank=rank),
    }
    if place is None:
        trainer = Trainer(clone(model), make_tokenizer(), config, **options)
    else:
        groups = {"members": place.members, "world": place.peers}
        trainer = FSDPTrainer(clone(model), make_tokenizer(), config, **groups, **options)
    for group in trainer._optimizer._adamw.param_groups:
        group["eps"] = 1e-6
    return trainer


def gradient(trainer):
    """The replica's whole gradient sum, flat."""
    with torch.no_grad():
        grads = [p.grad for p in trainer._model.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        return torch.cat([g.flatten() for g in whole])


def over_replicas(place, value):
    """Every replica's value."""
    if place.peers is None:
        return [value]
    values = [None] * dist.get_world_size(place.peers)
    dist.all_gather_object(values, value, group=place.peers)
    return values


def held(trainer):
    """All whole weights, by name."""
    return {name: weight.clone() for name, weight in trainer.weights()}


def apart(one, two):
    """Distance of two sets of tensors over the size of the second."""
    distance = sum(float((one[n].double() - two[n].double()).square().sum()) for n in two)
    return (distance / sum(float(t.double().square().sum()) for t in two.values())) ** 0.5
