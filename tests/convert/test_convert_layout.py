"""Which devices decode and train, as verl's and TRL's keys say it."""

from __future__ import annotations

from test_convert import trl_job, verl_job

from rollpacker.cli.convert import CommandLine

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
    assert any("holds no whole engines of 4" in line for line in found.by_hand)


def test_one_gpu_of_verl_and_several_nodes(tmp_path):
    keys = {NAME: "vllm", "trainer__n_gpus_per_node": 1, "trainer__nnodes": 2}
    found, run = verl_job(tmp_path, **keys)
    assert (run.engine.tensor_parallel, run.trainer.kind) == (1, "local")
    assert "devices.nodes" in found.refused["trainer.nnodes"]
    found, run = verl_job(tmp_path, **{NAME: "vllm", SIZE: 3, "trainer__n_gpus_per_node": 8})
    assert run.engine.tensor_parallel == 1
    assert any("8 GPUs do not divide into engines of 3" in line for line in found.by_hand)
    _, run = verl_job(tmp_path, **{NAME: "hf", SIZE: 4, "trainer__n_gpus_per_node": 8})
    assert (run.engine.kind, run.engine.tensor_parallel) == ("mini", 1)


def test_an_engine_that_verl_is_not_told_is_its_vllm(tmp_path):
    assert verl_job(tmp_path)[1].engine.kind == "vllm"
    assert verl_job(tmp_path, **{NAME: "hf"})[1].engine.kind == "mini"


def test_vllm_of_trl(tmp_path):
    keys = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5}
    found, run = trl_job(tmp_path, CommandLine(world=2), **keys, vllm_mode="colocate")
    assert (run.engine.gpu_memory, run.devices.per_node) == (0.5, 2)
    assert "vllm_mode" in found.ignored
    # Of a server, or freed while TRL trains: here it is kept.
    for key, value in (("vllm_mode", "server"), ("vllm_enable_sleep_mode", True)):
        found, run = trl_job(tmp_path, CommandLine(world=4), **keys, **{key: value})
        assert (run.engine.gpu_memory, set(found.refused)) == (0.4, {key})
    found, run = trl_job(tmp_path, vllm_mode="server", vllm_gpu_memory_utilization=0.5)
    assert (run.engine.kind, found.ignored["vllm_mode"]) == ("mini", "use_vllm is off")
    found, _ = trl_job(tmp_path, **keys, vllm_tensor_parallel_size=2)
    assert "engine.tensor_parallel" in found.refused["vllm_tensor_parallel_size"]


def test_their_files_are_for_gpus_unless_they_say_otherwise(tmp_path):
    for keys, kind in (({}, "cuda"), ({"trainer__device": "cpu"}, "cpu")):
        assert verl_job(tmp_path, **keys)[1].devices.kind == kind
    found, run = verl_job(tmp_path, trainer__device="npu")
    assert (run.devices.kind, "trainer.device" in found.refused) == ("auto", True)
    for keys, kind in (({}, "cuda"), ({"use_cpu": True}, "cpu")):
        assert trl_job(tmp_path, **keys)[1].devices.kind == kind


def test_processes_of_trl_are_the_devices_of_one_node(tmp_path):
    batch = {"per_device_train_batch_size": 8}
    found, run = trl_job(tmp_path, CommandLine(world=4), **batch)
    assert run.devices.per_node == 4
    assert any("ZeRO or FSDP is not in this file" in line for line in found.warnings)
    assert trl_job(tmp_path, **batch, num_processes=2)[1].devices.per_node == 2
    _, run = trl_job(tmp_path, **batch, num_processes=16, num_machines=2)
    assert run.devices.per_node == 0
    found, _ = trl_job(tmp_path, CommandLine(world=1), **batch)
    assert not any("ZeRO" in line for line in found.warnings)


def test_old_log_probabilities_of_verl_are_not_those_of_vllm(tmp_path):
    bypass = "algorithm__rollout_correction__bypass_mode"
    for keys, told in (({}, True), ({bypass: True}, False)):
        found, _ = verl_job(tmp_path, **{NAME: "vllm"}, **keys)
        assert any("old log-probabilities" in line for line in found.warnings) == told
    found, _ = verl_job(tmp_path, **{NAME: "hf"})
    assert not any("old log-probabilities" in line for line in found.warnings)


def test_one_response_a_prompt_is_told_by_their_key(tmp_path):
    found, _ = verl_job(tmp_path, actor_rollout_ref__rollout__n=1)
    assert "actor_rollout_ref.rollout.n=1 trains nothing with grpo" in found.warnings[0]
