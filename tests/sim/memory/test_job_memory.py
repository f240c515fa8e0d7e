"""The arithmetic of memory against numbers made by hand, and which layouts are offered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollpacker.config import RunConfig, parse
from rollpacker.sim.costs.hardware import DEVICES
from rollpacker.sim.costs.models import MODELS
from rollpacker.sim.memory.needs import JobMachine, MemoryNeeds, layer_token_bytes, needs
from rollpacker.sim.memory.settings import candidates, fitting, with_changes

SMALL, LARGE = MODELS["Qwen2.5-0.5B"], MODELS["Qwen2.5-7B"]
H100 = JobMachine(name="H100", cuda=True, devices=8, device_bytes=80e9, workers=8, on_device=1)
LAPTOP = JobMachine(name="CPU", cuda=False, devices=1, device_bytes=16e9, workers=2, on_device=2)


def job(dtype: str = "bfloat16", rank: int = 0, **sections: Any) -> RunConfig:
    tree = {
        "model": {"path": "it", "dtype": dtype, "lora_rank": rank},
        "data": {"path": "d"},
        "rewards": [{"function": "math"}],
        "rollout": {"max_completion_length": 4096},
        "train": {"micro_batch_tokens": 4096},
    }
    return parse(tree | sections)


def sizes(found: MemoryNeeds) -> dict[str, float]:
    """Gigabytes by name."""
    return {part.name: part.size / 1e9 for part in found.worker}


def test_the_small_model_on_a_gpu() -> None:
    """494,032,768 weights: 2 bytes, 4 of masters, 4 of sums, 8 of moments; 24 layers of 2 heads
    of 64 keep 2 x 24 x 2 x 64 x 2 = 12,288 bytes a token."""
    found = needs(job(), SMALL, H100)
    said = sizes(found)
    assert said["weights"] == pytest.approx(0.988065536)
    assert said["masters"] == said["gradient sums"] == pytest.approx(1.976131072)
    assert said["AdamW moments"] == pytest.approx(3.952262144)
    # (80 - 0.988 - 1) / 4 GB over 12,288 bytes.
    assert found.kv_tokens == pytest.approx(1_587_155, rel=1e-5)
    assert found.sequences == found.kv_tokens // 4096
    assert "engine's weights" not in said
    assert found.fits
    assert not found.tight


def test_an_environment_has_processes_and_longer_responses() -> None:
    tools = {"kind": "tools", "path": "t.py:f", "max_total_tokens": 8192, "processes": 3}
    plain = needs(job(), SMALL, H100)
    found = needs(job(environment=tools), SMALL, H100)
    assert found.longest == 2 * plain.longest == 8192
    assert found.sequences == found.kv_tokens // 8192
    (held,) = set(found.host) - set(plain.host)
    assert (held.name, held.size) == ("environments", pytest.approx(0.6e9))
    assert "3 x environment.processes" in held.note
    laptop = needs(job(environment=tools), SMALL, LAPTOP)
    assert "environments" in {part.name for part in laptop.shared}


def test_the_large_model_on_a_gpu_and_over_four() -> None:
    """7,615,616,512 weights take 18 bytes each where a worker holds them all, and 16 bytes over
    four workers besides the engine's own copy."""
    whole = needs(job(), LARGE, H100)
    held = sum(sizes(whole)[n] for n in ("weights", "masters", "gradient sums", "AdamW moments"))
    assert held == pytest.approx(18 * 7.615616512)
    assert not whole.fits
    spread = sizes(needs(job(trainer={"kind": "fsdp", "shard": 4}), LARGE, H100))
    held = sum(spread[name] for name in ("weights", "gradient sums", "AdamW moments"))
    assert held == pytest.approx(4 * 7.615616512)
    assert spread["engine's weights"] == pytest.approx(15.231233024)
    assert "masters" not in spread


def test_adapters_and_what_decodes_with_them() -> None:
    """Rank 16 on seven matrices of 28 layers: (3584 + 3584) x 2 + (3584 + 512) x 2 +
    (3584 + 18944) x 3 = 90,112 outputs and inputs a layer, 40,370,176 weights."""
    assert LARGE.adapter_parameters(16) == 40_370_176
    assert (
        LARGE.linear + 2 * LARGE.embedding
        < LARGE.parameters
        < 1.001 * (LARGE.linear + 2 * LARGE.embedding)
    )
    said = sizes(needs(job(rank=16), LARGE, H100))
    assert said["adapters"] == said["gradient sums"] == pytest.approx(0.161480704)
    assert said["AdamW moments"] == pytest.approx(0.322961408)
    assert said["engine's weights"] == pytest.approx(2 * LARGE.linear / 1e9)


def test_adapters_of_a_mixture_of_experts_are_attention_s() -> None:
    """48 layers of 4096 + 2048, twice 512 + 2048, 2048 + 4096 outputs and inputs."""
    found = MODELS["Qwen3-30B-A3B"].adapter_parameters(16)
    assert found == 16 * 48 * (6144 + 2 * 2560 + 6144)


def test_activations_of_a_token_in_a_layer() -> None:
    """In bfloat16 on a GPU: four times 896 and 4864, three times 896 of queries and outputs, twice
    128 of keys and values, 2 bytes each; two norms' 896 in float32."""
    assert layer_token_bytes(job(), SMALL, SMALL.blocks[0], cuda=True) == 2 * (
        4 * 896 + 4 * 4864 + 3 * 896 + 2 * 128 + 4 * 896
    )


def test_a_working_set_may_be_the_decoder_s() -> None:
    """256 responses in a cache of 100,000 tokens, on a GPU: a layer's share of its 1.2 GB, gathered
    and spread over 14 heads instead of 2, and 36 bytes for each of 151,936 tokens of each."""
    train = {"micro_batch_tokens": 1, "gradient_checkpointing": True}
    short = {"max_completion_length": 16, "prompts_per_step": 32, "num_generations": 8}
    config = job(rank=8, train=train, rollout=short, engine={"kv_tokens": 100_000})
    (work,) = (p for p in needs(config, SMALL, H100).worker if p.name == "working set")
    assert work.note == "decoding"
    assert work.size == 12_288 * 100_000 / 24 * 8 + 36 * 256 * 151_936


def test_vllm_takes_its_share() -> None:
    config = job(engine={"kind": "vllm", "gpu_memory": 0.5})
    said = sizes(needs(config, SMALL, H100))
    share = [said[name] for name in ("engine's weights", "engine's forward", "KV cache")]
    assert sum(share) == pytest.approx(40, rel=1e-4)
    assert said["engine's draws"] == 36 * 128 * 151_936 / 1e9
    starved = needs(job(engine={"kind": "vllm", "gpu_memory": 0.05}), LARGE, H100)
    assert starved.sequences == 0
    assert not starved.fits


@pytest.mark.parametrize("kind", ["mini", "vllm"])
def test_a_cache_as_long_as_a_response_has_no_room_for_its_prompt(kind: str) -> None:
    for tokens, fits in ((4096, False), (4096 + 32, True)):
        assert needs(job(engine={"kind": kind, "kv_tokens": tokens}), SMALL, H100).fits is fits


def test_a_reference_is_held_on_the_host_and_lent_to_the_gpu() -> None:
    config = job(train={"beta": 0.1, "micro_batch_tokens": 4096})
    host = {part.name: part.size for part in needs(config, SMALL, H100).host}
    assert host["references"] == 8 * 2 * SMALL.parameters
    assert sizes(needs(config, SMALL, LAPTOP))["reference"] == 2 * SMALL.parameters / 1e9
    with_adapters = job(rank=8, train={"beta": 0.1})
    assert "reference" not in sizes(needs(with_adapters, SMALL, LAPTOP))


def test_judges_are_counted_where_they_are() -> None:
    judge = {"function": "judge", "options": {"model": "Qwen/Qwen2.5-7B-Instruct"}}
    config = job(rewards=[judge], grading={"workers": 2})
    found = needs(config, SMALL, H100)
    # Embedding and head, and three of 28 layers.
    resident = 2 * 2 * (2 * LARGE.embedding + 3 * LARGE.linear // 28)
    assert [part.size for part in found.shared] == [resident]
    assert found.host[-1].size == 2 * 2 * LARGE.parameters
    unknown = job(rewards=[{"function": "judge", "options": {"model": "who/knows"}}])
    assert [part.name for part in needs(unknown, SMALL, LAPTOP).shared] == [
        "who/knows (size not known)"
    ]


def test_a_length_that_is_not_known_is_asked_for() -> None:
    said = r"^rollout\.max_completion_length is not set.*: set rollout\.max_completion_length"
    with pytest.raises(ValueError, match=said):
        needs(job(rollout={}), SMALL, H100)
    assert needs(job(rollout={}), replace(SMALL, context=32768), H100).longest == 32768


def test_the_fewest_workers_that_fit_are_offered() -> None:
    config = job(train={"micro_batch_tokens": 4096, "gradient_checkpointing": True})
    two, four = (
        needs(with_changes(config, {"trainer.kind": "fsdp", "trainer.shard": n}), LARGE, H100)
        for n in (2, 4)
    )
    assert not two.fits
    assert four.tight
    found = fitting(config, LARGE, H100)
    assert found is not None
    assert found[0] == {"trainer.kind": "fsdp", "trainer.shard": 8}
    larger = replace(H100, device_bytes=96e9)
    found = fitting(config, LARGE, larger)
    assert found is not None
    assert found[0] == {"trainer.kind": "fsdp", "trainer.shard": 4}


def test_a_smaller_cache_is_offered_before_adapters() -> None:
    config = job(train={"gradient_checkpointing": True})
    machine = replace(H100, device_bytes=15e9, workers=1)
    assert not needs(config, SMALL, machine).fits
    found = fitting(config, SMALL, machine)
    assert found is not None
    assert found[0] == {"engine.kv_tokens": 16 * 4096}
    assert found[1].kv_tokens == 16 * 4096


def test_vllm_stays_and_spreads_with_the_trainer() -> None:
    config = job(engine={"kind": "vllm", "gpu_memory": 0.3, "max_running": 64})
    offered = list(candidates(config, H100))
    spread = [c for c in offered if c.get("trainer.kind") == "fsdp"]
    assert spread
    assert all("engine" not in c for c in offered)
    found = fitting(config, LARGE, H100)
    assert found is not None
    changes, changed = found
    assert changes["trainer.kind"] == "fsdp"
    assert changed.fits


def test_an_engine_over_more_devices_is_offered_where_weights_do_not_fit() -> None:
    """32.8 billion weights of 2 bytes are 66 GB: on an H100 beside nothing."""
    large = MODELS["Qwen2.5-32B"]
    devices = {"layout": "separate", "training": 6}
    options = {"gradient_checkpointing": True, "micro_batch_tokens": 4096}
    trainer = {"kind": "fsdp"}
    config = job(rank=16, engine={"kind": "vllm"}, trainer=trainer, devices=devices, train=options)
    assert not needs(config, large, H100).fits
    found = fitting(config, large, H100)
    assert found is not None
    assert found[0] == {"engine.tensor_parallel": 2, "engine.gpu_memory": 0.5}
    assert found[1].division.sizes == (2,)


def test_vllm_is_offered_where_an_engine_of_one_device_is_too_large() -> None:
    """Weights of 66 GB for sampling leave no room on an H200 for a replica's eighth."""
    machine = replace(H100, device_bytes=141e9)
    large = MODELS["Qwen2.5-32B"]
    options = {"gradient_checkpointing": True, "micro_batch_tokens": 4096}
    config = job(train=options, trainer={"kind": "fsdp"}, engine={"kind": "mini", "max_running": 9})
    assert not needs(config, large, machine).fits
    found = fitting(config, large, machine)
    assert found is not None
    assert found[0]["engine"]["kind"] == "vllm"
    assert found[0]["engine"]["max_running"] == 9
    assert found[0]["engine"]["tensor_parallel"] > 1
    assert "model.lora_rank" not in found[0]
    exact = config.model_copy(update={"deterministic": True})
    assert not any("engine" in changes for changes in candidates(exact, machine))


def test_engines_of_several_devices_share_weights_and_heads() -> None:
    """Qwen2.5-7B has 28 layers with 4 heads of keys and values of 128: 57,344 bytes a token."""
    engine = {"kind": "vllm", "tensor_parallel": 2, "kv_tokens": 65_536}
    config = job(engine=engine, trainer={"kind": "fsdp", "shard": 4}, devices={"turns": "off"})
    found = needs(config, LARGE, H100)
    said = sizes(found)
    assert said["engine's weights"] == pytest.approx(7.615616512)
    assert said["KV cache"] == pytest.approx(65_536 * 57_344 / 1e9)
    assert found.kv_tokens == 2 * 65_536
    # Eight members of engines and eight of replicas, each of which loads the model.
    assert found.division.processes == 16
    host = {part.name: part.size for part in found.host}
    assert host["loading"] == 8 * 2 * LARGE.parameters
    assert host["weights for the engines"] == found.shared_weights == 2 * LARGE.parameters


def test_engines_that_rest_for_the_planner_are_counted() -> None:
    """28 heads are split by 2 and 4, not by 8."""
    engine = {"kind": "vllm", "tensor_parallel": 1, "kv_tokens": 65_536}
    rollout = {"max_completion_length": 4096, "planner": "paper"}
    config = job(engine=engine, trainer={"kind": "fsdp"}, rollout=rollout)
    found = needs(config, LARGE, H100)
    assert found.division.sizes == (1, 2, 4)
    assert found.division.processes == 4 * 8
    said, kv = sizes(found), 65_536 * 57_344 / 1e9
    assert said["engine of 2, idle"] == pytest.approx(7.615616512 + 1.5 + kv)
    assert said["engine of 4, idle"] == pytest.approx(7.615616512 / 2 + 1.5 + kv)
    assert said["processes"] == pytest.approx(4.0)
    single = [changes for changes in candidates(config, H100) if len(changes) == 1]
    assert {"rollout.planner": "off"} in single


def test_devices_that_decode_and_those_that_train_hold_other_things() -> None:
    devices = {"layout": "separate", "training": 4}
    config = job(engine={"kind": "vllm"}, trainer={"kind": "fsdp"}, devices=devices)
    found = needs(config, LARGE, H100)
    decoding = {part.name for part in found.worker}
    training = {part.name: part.size / 1e9 for part in found.trainer}
    assert not {"weights", "AdamW moments"} & decoding
    assert "engine's weights" in decoding
    assert training["AdamW moments"] == pytest.approx(8 * 7.615616512 / 4)
    assert found.total == max(found.worker_bytes, found.trainer_bytes)
    # On a CPU all of them have one memory, and what they share is in it once.
    laptop = replace(LAPTOP, workers=4, on_device=4)
    small = job(devices={"layout": "separate", "training": 1})
    found = needs(small, SMALL, laptop)
    (copy,) = found.shared
    assert copy.size == 2 * SMALL.parameters
    assert found.total == pytest.approx(3 * found.worker_bytes + found.trainer_bytes + copy.size)


def test_what_devices_do_not_divide_into_is_one_line() -> None:
    engine = {"kind": "vllm", "tensor_parallel": 4}
    with pytest.raises(ValueError, match=r"holds no whole engines of 4: set trainer\.kind=fsdp"):
        needs(job(engine=engine), LARGE, H100)
    engine = {"kind": "vllm", "tensor_parallel": 8}
    with pytest.raises(
        ValueError, match=r"split this model: 8 does not divide its 28 .* \(1, 2, 4, 28 would do\)"
    ):
        needs(job(engine=engine, trainer={"kind": "fsdp"}), LARGE, H100)


def test_nothing_is_offered_where_nothing_fits() -> None:
    tiny = replace(H100, device_bytes=1e9)
    assert fitting(job(), MODELS["Qwen2.5-72B"], tiny) is None


@given(
    model=st.sampled_from(sorted(MODELS)),
    device=st.sampled_from(sorted(DEVICES)),
    gpus=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    rank=st.sampled_from([0, 8]),
    engine=st.sampled_from(["mini", "vllm"]),
    beta=st.sampled_from([0.0, 0.1]),
)
def test_what_is_offered_fits_and_is_a_job(
    model: str, device: str, gpus: int, dtype: str, rank: int, engine: str, beta: float
) -> None:
    machine = replace(
        H100, devices=gpus, workers=gpus, device_bytes=DEVICES[device].memory, name=device
    )
    train = {"beta": beta, "micro_batch_tokens": 8192}
    config = job(dtype, rank, engine={"kind": engine}, train=train)
    now = needs(config, MODELS[model], machine)
    assert all(part.size >= 0 for part in (*now.worker, *now.host))
    found = fitting(config, MODELS[model], machine)
    if found is not None:
        changes, changed = found
        assert changed == needs(with_changes(config, changes), MODELS[model], machine)
        assert changed.fits


@given(shard=st.sampled_from([1, 2, 4]), rank=st.sampled_from([0, 8]))
def test_more_workers_of_a_replica_hold_less_each(shard: int, rank: int) -> None:
    def trainer(size: int) -> float:
        spread = job(rank=rank, trainer={"kind": "fsdp", "shard": size})
        parts = sizes(needs(spread, LARGE, H100))
        return sum(parts.get(n, 0) for n in ("weights", "adapters", "gradient sums"))

    assert trainer(2 * shard) == pytest.approx(trainer(shard) / 2)
