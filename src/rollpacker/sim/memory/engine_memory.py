"""What engines hold: weights of their own and KV caches, those of engines that rest too."""

from __future__ import annotations

from rollpacker.config import MiniEngineConfig, VllmEngineConfig
from rollpacker.config.rollout import KV_SHARE
from rollpacker.sim.memory.needs import PROCESS, Part, Placed
from rollpacker.sim.memory.working_set import decoding, drawing

_VLLM_RUN = 1.5e9
"""What vLLM sets aside for its own forward pass, of ``engine.gpu_memory``."""
_COLUMNS = 32
"""The engine for CPUs pads a head to a multiple of it."""


def engine_parts(job: Placed, trained: float) -> tuple[int, Part, list[Part]]:
    """KV budget of an engine in tokens, what it takes on a device, and all that engines hold there.

    ``trained``: bytes of the trainer's weights.
    """
    base, *larger = job.division.sizes
    parts = _weights(job, base)
    tokens, kv = _kv(job, base, trained, sum(part.size for part in parts))
    resting = (_resting(job, size, trained) for size in larger)
    return tokens, kv, [*parts, kv, *_draws(job), *resting]


def _draws(job: Placed) -> list[Part]:
    """What our sampler takes in vLLM's process, which keeps it, besides ``engine.gpu_memory``."""
    engine = job.config.engine
    if not isinstance(engine, VllmEngineConfig):
        return []
    running = _most_running(job, engine)
    note = f"the next tokens of {running:,} responses"
    size = drawing(job.shape, running)
    return [Part(name="engine's draws", size=size, note=note, estimated=True)]


def _resting(job: Placed, devices: int, trained: float) -> Part:
    """A part of an engine of more devices. It sleeps until the planner puts them together; what it
    gives back by that, on a GPU, it has held as the run started, beside all others."""
    held = sum(part.size for part in _weights(job, devices))
    _, kv = _kv(job, devices, trained, held)
    note = f"1/{devices} of the weights, a KV cache"
    name = f"engine of {devices}, idle"
    return Part(name=name, size=held + kv.size, note=note, estimated=True)


def _weights(job: Placed, devices: int) -> list[Part]:
    """Weights that an engine of so many devices holds for itself on each, and what vLLM sets
    aside."""
    config, shape = job.config, job.shape
    if isinstance(config.engine, VllmEngineConfig):
        note = "vLLM's own copy" + (f", 1/{devices} of it" if devices > 1 else "")
        copy = Part(name="engine's weights", size=job.model_bytes / devices, note=note)
        run = Part(name="engine's forward", size=_VLLM_RUN, estimated=True)
        return [copy, run] if job.machine.cuda else [copy]
    if not isinstance(config.engine, MiniEngineConfig):
        return []
    parts: list[Part] = []
    if job.separate or job.sharded:
        note = "a whole model to decode from"
        parts.append(Part(name="engine's weights", size=job.model_bytes, note=note))
    elif config.model.lora_rank:
        note = "linear layers with adapters merged"
        parts.append(Part(name="engine's weights", size=job.type_bytes * shape.linear, note=note))
    if not job.machine.cuda:
        packed = _packed(job)
        own = packed * (shape.linear + shape.embedding)
        # A type that the model has not: the embedding cannot be the model's own.
        own += packed * shape.embedding if packed != job.type_bytes else 0
        parts.append(Part(name="packed weights", size=own, note="as the CPU's kernels read them"))
    return parts


def _packed(job: Placed) -> int:
    """Bytes of a packed weight, and of a number in the KV cache of a CPU."""
    return 4 if job.type_bytes == 4 else job.machine.packed


def _kv_token_bytes(job: Placed, devices: int) -> float:
    """Of one token, on each of the devices that share the heads; of what is kept of a sequence
    however long it is (windows, states), a token's part where responses have their full length."""
    values = job.shape.cached(devices, job.longest)
    each = (values.token + values.sequence / job.longest) / devices
    if not isinstance(job.config.engine, MiniEngineConfig) or job.machine.cuda:
        return each * job.type_bytes
    width = job.shape.blocks[0].kv_width // 2
    padded = -(-width // _COLUMNS) * _COLUMNS / width if width else 1.0
    return each * padded * _packed(job)


def _kv(job: Placed, devices: int, trained: float, held: float) -> tuple[int, Part]:
    """KV budget of an engine of so many devices in tokens, and what it takes on each of them.

    Args:
        job: that it is for.
        devices: of the engine.
        trained: bytes of the trainer's weights.
        held: of the engine's own, and its forward pass.
    """
    engine, token = job.config.engine, _kv_token_bytes(job, devices)
    if not isinstance(engine, MiniEngineConfig | VllmEngineConfig):
        return 1 << 30, Part(name="KV cache", size=0.0)
    if engine.kv_tokens:
        tokens = devices * engine.kv_tokens
        each = "a device" if devices > 1 else "tokens"
        note = f"{engine.kv_tokens:,} {each}: engine.kv_tokens"
        return tokens, Part(name="KV cache", size=tokens * token, note=note)
    tokens = int(_kv_bytes(job, trained, held) / token)
    if job.shape.context:
        tokens = min(tokens, engine.max_running * job.shape.context)
    vllm = isinstance(engine, VllmEngineConfig)
    how = "engine.gpu_memory" if vllm and job.machine.cuda else "a quarter of what is free"
    if vllm or job.machine.cuda:
        note = f"{tokens:,} tokens: {how}"
        return tokens, Part(name="KV cache", size=tokens * token, note=note)
    # On a CPU memory is taken as it is first used.
    used = min(tokens, _most_running(job, engine) * job.longest)
    note = f"{used:,} tokens of {tokens:,}, {how}"
    return tokens, Part(name="KV cache", size=used * token, note=note, estimated=True)


def _most_running(job: Placed, engine: MiniEngineConfig | VllmEngineConfig) -> int:
    """Responses that one engine decodes together, when all are on it."""
    rollout = job.config.rollout
    return min(engine.max_running, rollout.prompts_per_step * rollout.num_generations)


def _kv_bytes(job: Placed, trained: float, held: float) -> float:
    """Of a budget that is not given, as engines find it when models are loaded."""
    machine, division, engine = job.machine, job.division, job.config.engine
    process, share = PROCESS[machine.cuda], machine.device_bytes / machine.on_device
    if machine.cuda and isinstance(engine, VllmEngineConfig):
        return max(0.0, engine.gpu_memory * share - held)
    loaded = job.model_bytes if job.sharded else trained
    if machine.cuda:
        return max(0.0, share - (0.0 if job.separate else loaded) - held - process) / KV_SHARE
    # On a CPU every engine takes its quarter of what all processes have left.
    taken = division.training * loaded + division.decoding * held + division.processes * process
    return max(0.0, machine.device_bytes - taken) / KV_SHARE


def decoding_phases(job: Placed, cache: float) -> dict[str, float]:
    """What the built-in engine takes for a while, by what it does, with ``cache`` bytes of KV."""
    engine = job.config.engine
    if not isinstance(engine, MiniEngineConfig):
        return {}
    if job.machine.cuda:
        return {"decoding": decoding(job.shape, _most_running(job, engine), cache)}
    return {"packing the weights": 2 * _packed(job) * job.shape.embedding}
