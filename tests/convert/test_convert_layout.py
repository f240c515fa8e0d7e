"""Which devices decode and train, as verl's and TRL's keys say it."""

from __future__ import annotations

from test_convert import trl_job, verl_job

from rollpacker.cli.convert import Asked

_ROLLOUT = "actor_rollout_ref__rollout__"
SIZE, NAME = f"{_ROLLOUT}tensor_model_parallel_size", f"{_ROLLOUT}name"
SHARD = "actor_rollout_ref__actor__fsdp_config__fsdp_size"


def test_engines_and_replicas_of_verl(tmp_path):
    keys = {NAME: "vllm", SIZE: 4, "trainer__n_gpus_per_node": 8}
    found, run = verl_job(tmp_path, **keys, **{SHARD: 4})
    assert (run.engine.kind, run.engine.tensor_parallel) == ("vllm", 4)
    assert (run.trainer.kind, run.trainer.shard, run.devices.per_node) == ("fsdp", 4, 8)
    # Half an engine is in no replica.
    found, run = verl_job(tmp_path, **keys, **{SHARD: 2})
    assert run.trainer.shard == 0
    assert any("holds no whole engines of 4" in line for line in found.warnings)


def test_one_gpu_of_verl_and_several_nodes(tmp_path):
    keys = {NAME: "vllm", "trainer__n_gpus_per_node": 1, "trainer__nnodes": 2}
    found, run = verl_job(tmp_path, **keys)
    assert (run.engine.tensor_parallel, run.trainer.kind) == (1, "local")
    assert found.refused["trainer.nnodes"] == "a run has one machine"
    found, run = verl_job(tmp_path, **{NAME: "vllm", SIZE: 3, "trainer__n_gpus_per_node": 8})
    assert run.engine.tensor_parallel == 1
    assert any("8 GPUs do not divide into engines of 3" in line for line in found.warnings)
    _, run = verl_job(tmp_path, **{NAME: "hf", SIZE: 4, "trainer__n_gpus_per_node": 8})
    assert (run.engine.kind, run.engine.tensor_parallel) == ("mini", 1)


def test_vllm_of_trl_beside_the_trainer(tmp_path):
    keys = {"use_vllm": True, "vllm_tensor_parallel_size": 2, "vllm_gpu_memory_utilization": 0.5}
    found, run = trl_job(tmp_path, Asked(world=2), **keys, vllm_mode="colocate")
    assert (run.engine.tensor_parallel, run.engine.gpu_memory) == (2, 0.5)
    assert (run.trainer.kind, run.trainer.shard, run.devices.layout) == ("fsdp", 2, "colocated")
    assert "vllm_mode" in found.ignored


def test_a_server_of_trl_has_devices_of_its_own(tmp_path):
    keys = {"use_vllm": True, "vllm_mode": "server", "vllm_tensor_parallel_size": 2}
    found, run = trl_job(tmp_path, Asked(world=4), **keys, per_device_train_batch_size=8)
    assert (run.devices.layout, run.devices.training, run.devices.per_node) == ("separate", 4, 6)
    assert (run.engine.tensor_parallel, run.trainer.kind) == (2, "local")
    found, run = trl_job(tmp_path, **keys)
    assert run.devices.layout == "colocated"
    assert "devices.layout=separate" in found.refused["vllm_mode"]
