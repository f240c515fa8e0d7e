"""Which devices decode and train, as verl's and TRL's keys say it."""

from __future__ import annotations

import pytest
from test_convert import comment_of, job, trl_job, verl_job

from rollpacker.cli.convert import CommandLine, script
from rollpacker.cli.convert.table import Unknown
from rollpacker.policy.engines.device_split import turns
from rollpacker.sim.memory.settings import left_out

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
    assert any("has no whole engines of 4" in line for line in found.by_hand)


@pytest.mark.parametrize(
    ("gpus", "size", "shard", "batch", "advice"),
    [
        (8, 2, -1, 256, "shard: 4 makes two replicas, so that one can compute gradients"),
        (8, 2, -1, 512, "shard: 4 makes two replicas, so that with updates_per_step: 1 one can"),
        (8, 2, 4, 256, ""),
        (8, 8, -1, 256, ""),  # half of the GPUs hold no engine
        (7, 1, -1, 256, ""),
    ],
)
def test_half_of_a_replica_of_verl_is_named(tmp_path, gpus, size, shard, batch, advice):
    keys = {NAME: "vllm", SIZE: size, SHARD: shard, "trainer__n_gpus_per_node": gpus}
    found, run = verl_job(tmp_path, **keys, data__train_batch_size=batch)
    assert run.trainer.shard == max(shard, 0)
    assert advice in comment_of(found.text, "shard")
    assert ("busy until the last response" in found.text) == bool(advice)


def test_one_gpu_of_verl_and_several_nodes(tmp_path):
    keys = {NAME: "vllm", "trainer__n_gpus_per_node": 1, "trainer__nnodes": 2}
    found, run = verl_job(tmp_path, **keys)
    assert (run.engine.tensor_parallel, run.trainer.kind, run.trainer.shard) == (1, "fsdp", 0)
    assert (run.devices.nodes, run.devices.per_node, run.cluster.address) == (2, 1, "auto")
    assert "trainer.nnodes" in found.translated
    _, run = verl_job(tmp_path, **keys | {"trainer__nnodes": 1})
    assert (run.trainer.kind, run.devices.nodes, run.cluster.address) == ("local", 1, "")
    # verl spreads a replica over all GPUs, where engines are of one too; it may span nodes.
    many = {NAME: "vllm", "trainer__n_gpus_per_node": 8, "trainer__nnodes": 8}
    assert verl_job(tmp_path, **many, **{SIZE: 1})[1].trainer.kind == "fsdp"
    found, run = verl_job(tmp_path, **many, **{SIZE: 4, SHARD: 32})
    assert (run.trainer.shard, SHARD.replace("__", ".") in found.translated) == (32, True)
    found, run = verl_job(tmp_path, **{NAME: "vllm", SIZE: 3, "trainer__n_gpus_per_node": 8})
    assert run.engine.tensor_parallel == 1
    assert any("8 GPUs do not divide into engines of 3" in line for line in found.by_hand)
    _, run = verl_job(tmp_path, **{NAME: "hf", SIZE: 4, "trainer__n_gpus_per_node": 8})
    assert (run.engine.kind, run.engine.tensor_parallel) == ("mini", 1)


def test_an_engine_that_verl_is_not_told_is_its_vllm(tmp_path):
    assert verl_job(tmp_path)[1].engine.kind == "vllm"
    assert verl_job(tmp_path, **{NAME: "hf"})[1].engine.kind == "mini"
    for name, told in (("vllm", False), ("hf", False), ("trtllm", True)):
        found, _ = verl_job(tmp_path, **{NAME: name})
        assert any(f"vLLM replaces {name}" in line for line in found.warnings) == told


def test_an_engine_frees_its_memory_as_in_verl(tmp_path):
    share, frees = (f"{_ROLLOUT}{key}" for key in ("gpu_memory_utilization", "free_cache_engine"))
    found, run = verl_job(tmp_path, **{share: 0.6, frees: True})
    assert turns(run, gpus=True) == "engine"
    assert "engine.gpu_memory" in left_out(run)
    said = "frees its memory while gradients are computed, as in verl (devices.turns)"
    assert said in found.ignored[share.replace("__", ".")]
    found, _ = verl_job(tmp_path, **{frees: False})
    assert found.refused[frees.replace("__", ".")].startswith("devices.turns: off keeps")


def test_vllm_of_trl(tmp_path):
    keys = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.5}
    found, run = trl_job(tmp_path, CommandLine(world=2), **keys, vllm_mode="colocate")
    assert (run.engine.gpu_memory, run.devices.per_node) == (0.5, 2)
    assert "vllm_mode" in found.ignored
    found, run = trl_job(tmp_path, CommandLine(world=4), **keys, vllm_mode="server")
    assert (run.engine.gpu_memory, set(found.refused)) == (0.4, {"vllm_mode"})
    # An engine sleeps here too while gradients are computed.
    assert turns(run, gpus=True) == "engine"
    found, run = trl_job(tmp_path, CommandLine(world=4), **keys, vllm_enable_sleep_mode=True)
    assert (run.engine.gpu_memory, turns(run, gpus=True)) == (0.5, "engine")
    assert found.ignored["vllm_enable_sleep_mode"].endswith("(devices.turns)")
    found, run = trl_job(tmp_path, vllm_mode="server", vllm_gpu_memory_utilization=0.5)
    assert (run.engine.kind, found.ignored["vllm_mode"]) == ("mini", "use_vllm is off")
    _, run = trl_job(tmp_path, CommandLine(world=4), **keys, vllm_tensor_parallel_size=2)
    assert (run.engine.tensor_parallel, run.trainer.kind, run.trainer.shard) == (2, "fsdp", 2)
    for world, mode in ((3, "colocate"), (4, "server")):
        more = {"vllm_mode": mode, "vllm_tensor_parallel_size": 2}
        found, run = trl_job(tmp_path, CommandLine(world=world), **keys, **more)
        assert "engine.tensor_parallel" in found.refused["vllm_tensor_parallel_size"]
        assert (run.engine.tensor_parallel, run.trainer.kind) == (1, "local")


def test_their_files_are_for_gpus_unless_they_say_otherwise(tmp_path):
    for keys, kind in (({}, "cuda"), ({"trainer__device": "cpu"}, "cpu")):
        assert verl_job(tmp_path, **keys)[1].devices.kind == kind
    found, run = verl_job(tmp_path, trainer__device="npu")
    assert (run.devices.kind, "trainer.device" in found.refused) == ("auto", True)
    for keys, kind in (({}, "cuda"), ({"use_cpu": True}, "cpu")):
        assert trl_job(tmp_path, **keys)[1].devices.kind == kind


def test_processes_of_trl_are_the_devices_of_its_machines(tmp_path):
    batch = {"per_device_train_batch_size": 8}
    found, run = trl_job(tmp_path, CommandLine(world=4), **batch)
    assert run.devices.per_node == 4
    assert any("lacks accelerate's settings" in line for line in found.warnings)
    assert trl_job(tmp_path, **batch, num_processes=2)[1].devices.per_node == 2
    _, run = trl_job(tmp_path, **batch, num_processes=16, num_machines=2)
    assert (run.devices.nodes, run.devices.per_node, run.cluster.address) == (2, 8, "auto")
    _, run = trl_job(tmp_path, CommandLine(world=6), **batch, num_machines=4)
    assert (run.devices.nodes, run.devices.per_node) == (4, 0)
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


MICRO, MOST = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu", "data__max_response_length"


@pytest.mark.parametrize(
    ("size", "response", "tokens", "capped"),
    [
        (16, 8192, 16384, True),  # of 147,456: verl packs what is shorter, and so does a run here
        (2, 1024, 3072, False),
        (10, 1126, 16380, False),
        (4, 20480, 20992, True),  # the longest prompt and response
        (1, 20480, 20992, False),
    ],
)
def test_the_worst_case_of_a_micro_batch_is_capped(tmp_path, size, response, tokens, capped):
    found, run = verl_job(tmp_path, **{MICRO: size, MOST: response})
    assert run.train.micro_batch_tokens == tokens
    assert (f"{size * (512 + response)} at worst: {tokens} at a time" in found.text) is capped


DRAWN = "data__gen_batch_size"
FILTER, TRIES = "algorithm__filter_groups__enable", "algorithm__filter_groups__max_num_gen_batches"


def test_prompts_that_verl_draws_at_a_time(tmp_path):
    keys = {"data__train_batch_size": 128, DRAWN: 384}
    found, run = verl_job(tmp_path, **keys, **{FILTER: True, TRIES: 5})
    assert (run.rollout.prompts_per_step, run.rollout.dynamic_sampling.max_draws) == (128, 14)
    assert "data.gen_batch_size" in found.translated
    # Endless in verl: there is nothing of which it is a part.
    found, _ = verl_job(tmp_path, **keys, **{FILTER: True})
    assert "as groups are missing" in found.ignored["data.gen_batch_size"]
    # All that is drawn is trained on where no group is left out.
    found, run = verl_job(tmp_path, **keys)
    assert (run.rollout.prompts_per_step, run.train.updates_per_step) == (384, 2)
    assert found.ignored["data.train_batch_size"] == "data.gen_batch_size overrides it"
    found, run = verl_job(tmp_path, data__train_batch_size=128)
    assert (run.rollout.prompts_per_step, found.ignored) == (128, {})
    assert "updates need the whole batch" not in found.text


def test_a_critic_is_refused_in_a_line_that_says_what_to_do(tmp_path):
    said = r"theirs\.yaml: {}algorithm\.adv_estimator=gae trains a critic, .* set .*=grpo and .*n=8"
    with pytest.raises(ValueError, match=said.format("")):
        verl_job(tmp_path, algorithm__adv_estimator="gae")
    with pytest.raises(ValueError, match=said.format("verl's default ")):
        verl_job(tmp_path, algorithm__adv_estimator=None)
    file = tmp_path / "ppo.py"
    file.write_text("PPOTrainer(args=PPOConfig(num_ppo_epochs=1), model=policy).train()")
    with pytest.raises(ValueError, match=r"PPOTrainer trains a critic.* use GRPOTrainer"):
        job(tmp_path, file)


def test_a_reward_model_of_verl_and_what_it_filters_by(tmp_path):
    folder = {"reward_model__enable": True, "reward_model__model__path": "models/judge"}
    found, run = verl_job(tmp_path, **folder)
    assert [each.function for each in run.rewards] == ["models/judge"]
    assert any("must be a folder" in line for line in found.warnings)
    assert not found.refused
    metric = {FILTER: True, "algorithm__filter_groups__metric": "acc"}
    assert not verl_job(tmp_path, **metric)[0].refused
    own = {"custom_reward_function__path": "r.py"}
    assert set(verl_job(tmp_path, **metric, **own)[0].refused) == {"algorithm.filter_groups.metric"}


def test_scripts_that_bash_takes(tmp_path):
    """A name of the environment that the script hands on, and a backslash at the end."""
    text = "A=$A\nB=${B}/x\nC=1\nC=$C.5\npython $A a.b=$A a.c=${B} a.d=$C \\"
    found = script.overrides(text)
    assert (found["a.b"], found["a.c"], found["a.d"]) == ("$A", "${B}", 1.5)
    assert isinstance(found["a.b"], Unknown)
    assert script.overrides(text + " \n") == found
