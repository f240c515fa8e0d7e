"""What a spread replica writes is read by any other, spread or not."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.distributed as dist
from gang import held, make_trainer, place, run
from peft import PeftModel
from tiny_models import group_batch, make_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollpacker.config import GRPOConfig

pytestmark = pytest.mark.slow

CASES = {
    "plain": ("qwen3", torch.float32, {"lr_scheduler_type": "linear", "warmup_steps": 2}),
    "half": ("qwen2", torch.bfloat16, {"beta": 0.1}),
    "lora": ("llama", torch.float32, {"rank": 2}),
}


def _groups():
    return group_batch(make_model(), GRPOConfig(), off=0.1)


def _whole_state(trainer):
    return {
        (kind, name): t.full_tensor() if hasattr(t, "full_tensor") else t.clone()
        for kind, tensors in trainer._state().items()
        for name, t in tensors.items()
    }


def _write(rank, folder, world, name):
    """Two updates, a checkpoint, and what it must hold."""
    family, dtype, settings = CASES[name]
    here = place(world)
    trainer = make_trainer(make_model(family).to(dtype), here, **settings)
    for _ in range(2):
        trainer.apply(trainer.accumulate(_groups()))
    trainer.save(folder / "saved")
    state, weights = _whole_state(trainer), held(trainer)
    trainer.apply(trainer.accumulate(_groups()))
    then = trainer.checksum()
    if rank == 0:
        torch.save((state, weights, (world, then)), folder / "wanted.pt")


def _read(rank, folder, world, name, saved, again):
    """Load it with another number of processes, write it again; with as many, go on as they did."""
    family, dtype, settings = CASES[name]
    here = place(world) if world > 1 else None
    trainer = make_trainer(make_model(family).to(dtype), here, **settings)
    trainer.accumulate(_groups())
    members, then = _assert_holds(trainer, saved)
    if again is not None:
        trainer.save(again / "saved")
        if rank == 0:
            (again / "wanted.pt").hardlink_to(saved / "wanted.pt")
    if world == members:
        trainer.apply(trainer.accumulate(_groups()))
        assert trainer.checksum() == then


def _assert_holds(trainer, folder):
    trainer.load(folder / "saved")
    state, weights, then = torch.load(folder / "wanted.pt")
    assert not trainer._optimizer.sums.any()
    for found, wanted in ((_whole_state(trainer), state), (held(trainer), weights)):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert torch.equal(found[key], wanted[key]), key
    return then


def _assert_loads_from_the_hubs_layout(folder, base):
    _, weights, _ = torch.load(folder / "wanted.pt")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype="auto")
    for name, weight in loaded.named_parameters():
        assert torch.equal(weight, weights[name]), name
        assert weight.dtype == weights[name].dtype
    assert AutoTokenizer.from_pretrained(folder / "saved").eos_token_id == 1
    adapter = folder / "saved" / "adapter"
    if adapter.exists():
        merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
        for name, weight in merged.named_parameters():
            torch.testing.assert_close(weight, weights[name])


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_moves_from_four_processes_to_two_and_one_and_back(name, tmp_path):
    family, dtype, settings = CASES[name]
    four, two, one, back = (tmp_path / each for each in ("four", "two", "one", "back"))
    run(_write, 4, four, 4, name)
    _assert_loads_from_the_hubs_layout(four, make_model(family).to(dtype))
    run(_read, 2, two, 2, name, four, two)
    one.mkdir()
    _read(0, one, 1, name, two, one)
    run(_read, 4, back, 4, name, one, None)
    local = make_trainer(make_model(family).to(dtype), **settings)
    local.load(one / "saved")
    assert local.apply(local.accumulate(_groups())).learning_rate == 1e-3


def _cannot_write(rank, folder):
    here = place(2)
    trainer = make_trainer(make_model(), here)
    (folder / "saved").write_text("a file where the folder should be")
    dist.barrier()
    with pytest.raises(OSError, match="exists" if rank == 0 else "could not write the model"):
        trainer.save(folder / "saved")
    trainer.save(folder / "other")


def test_a_disk_that_takes_no_more_is_an_error_of_all_members(tmp_path):
    run(_cannot_write, 2, tmp_path)


def _yield_weights(rank, folder):
    here = place(2)
    for settings in ({}, {"rank": 2}):
        model = make_model("qwen2")
        trainer = make_trainer(model, here, **settings)
        assert not trainer.shares_weights
        names = [name for name, _ in model.named_parameters()]
        found, before = {}, None
        for name, weight in trainer.weights():
            assert before is None or before() is None, "one is held at a time"
            before = weakref.ref(weight)
            found[name] = weight.clone()
            del weight
        assert list(found) == names
        assert all(torch.equal(found[name], p) for name, p in model.named_parameters())


def test_weights_come_whole_and_by_the_checkpoints_names(tmp_path):
    run(_yield_weights, 2, tmp_path)
