"""How much memory a job takes, by arithmetic on its model's shape: nothing is loaded.

Weights, sums, optimizer state and caches are what is allocated; what a forward and backward keep,
and what a process takes before it holds anything, are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollpacker.config import FSDPTrainerConfig, MiniEngineConfig, RunConfig, VllmEngineConfig
from rollpacker.config.rollout import KV_SHARE
from rollpacker.sim.graders import graders
from rollpacker.sim.models import ModelShape
from rollpacker.sim.working_set import backward, decoding, forward, gathered

_PROCESS = {True: 1.0e9, False: 0.7e9}
"""On CUDA: context, libraries' workspaces, NCCL. On a CPU: libraries and compiled kernels."""
_HOST_PROCESS = 2.0e9
"""Of a worker on CUDA, in the machine's own memory."""
_VLLM_RUN = 1.5e9
"""What vLLM sets aside for its own forward pass, of ``engine.gpu_memory``."""
_ROOMY = 0.9
"""Share of a device that a job takes at most without being tight."""
_COLUMNS = 32
"""The engine for CPUs pads a head to a multiple of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a job runs on.

    Args:
        name: for people.
        cuda: whether ``devices`` are GPUs; else it is one, the machine's own memory.
        devices: how many.
        device_bytes: of each.
        workers: of the job.
        on_device: of them, on the fullest device.
        packed: bytes of a bfloat16 weight as the engine for CPUs packs it.
    """

    name: str
    cuda: bool
    devices: int
    device_bytes: float
    workers: int
    on_device: int
    packed: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that is held, in bytes; ``note`` says what it is."""

    name: str
    size: float
    note: str = ""
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a job takes.

    Args:
        machine: on which.
        worker: on its device, each worker.
        shared: on the device once: what grades.
        host: of the machine's own memory, where devices are GPUs.
        kv_tokens: KV budget of a worker's engine.
        longest: tokens of the longest response.
    """

    machine: Machine
    worker: tuple[Part, ...]
    shared: tuple[Part, ...]
    host: tuple[Part, ...]
    kv_tokens: int
    longest: int

    @property
    def worker_bytes(self) -> float:
        """Of one worker."""
        return sum(part.size for part in self.worker)

    @property
    def total(self) -> float:
        """Of the fullest device."""
        return self.machine.on_device * self.worker_bytes + sum(p.size for p in self.shared)

    @property
    def sequences(self) -> int:
        """Responses of full length that the KV budget holds, their prompts aside."""
        return self.kv_tokens // self.longest

    @property
    def fits(self) -> bool:
        """Whether the device has as much, and the engine can decode at least one response."""
        return self.total <= self.machine.device_bytes and self.sequences > 0

    @property
    def tight(self) -> bool:
        """Whether it fits with so little to spare that estimates and fragments matter."""
        return self.fits and self.total > _ROOMY * self.machine.device_bytes


def needs(config: RunConfig, shape: ModelShape, machine: Machine) -> Needs:
    """The memory of a job on a machine. Raises ``ValueError`` where its longest response is not
    known."""
    longest = config.rollout.max_completion_length or shape.context
    if not longest:
        raise ValueError(
            f"rollout.max_completion_length is not set, and the context of {config.model.path} is "
            "not known without its config.json: set it"
        )
    trainer = _trainer(config, shape, machine)
    engine = _engine(config, shape, machine)
    copies = sum(part.size for part in engine)
    tokens, kv = _kv(config, shape, machine, longest, trainer[0].size, copies)
    work = _work(config, shape, machine, longest, sum(p.size for p in trainer), kv.size)
    process = Part(name="process", size=_PROCESS[machine.cuda], estimated=True)
    reference = _reference_bytes(config, shape, machine)
    if reference and not machine.cuda:
        trainer.append(Part(name="reference", size=reference, note="the first weights"))
    on_device, on_host = graders(config, cuda=machine.cuda)
    shared = tuple(Part(name=name, size=size, estimated=True) for name, size in on_device)
    graded = [Part(name=name, size=size, estimated=True) for name, size in on_host]
    return Needs(
        machine=machine,
        worker=(*trainer, *engine, kv, work, process),
        shared=shared if machine.cuda else (*shared, *graded),
        host=(*_host(config, shape, machine, reference), *graded) if machine.cuda else (),
        kv_tokens=tokens,
        longest=longest,
    )


def type_bytes(config: RunConfig) -> int:
    """Of a weight in ``model.dtype``."""
    return 2 if config.model.dtype == "bfloat16" else 4


def _trainer(config: RunConfig, shape: ModelShape, machine: Machine) -> list[Part]:
    """What stays: weights first."""
    size, count = type_bytes(config), shape.parameters
    shard = config.trainer.members(machine.workers)
    sharded = isinstance(config.trainer, FSDPTrainerConfig)
    share = f", 1/{shard} of them" if shard > 1 else ""
    rank = config.model.lora_rank
    parts: list[Part] = []
    if rank:
        trained = shape.adapter_parameters(rank)
        note = f"{config.model.dtype}, frozen{share}"
        parts.append(Part(name="weights", size=size * count / shard, note=note))
        parts.append(Part(name="adapters", size=4 * trained / shard, note=f"rank {rank}, float32"))
    else:
        trained = count
        kept = 4 if sharded else size
        note = f"{'float32' if kept == 4 else config.model.dtype}{share}"
        parts.append(Part(name="weights", size=kept * count / shard, note=note))
        if kept < 4:
            parts.append(Part(name="masters", size=4 * count, note="the weights in float32"))
    parts.append(Part(name="gradient sums", size=4 * trained / shard, note=f"float32{share}"))
    parts.append(Part(name="AdamW moments", size=8 * trained / shard, note=f"float32{share}"))
    return parts


def _engine(config: RunConfig, shape: ModelShape, machine: Machine) -> list[Part]:
    """Weights that the engine holds for itself, and what vLLM sets aside."""
    size = type_bytes(config)
    if isinstance(config.engine, VllmEngineConfig):
        note = "vLLM's own copy"
        copy = Part(name="engine's weights", size=size * shape.parameters, note=note)
        run = Part(name="engine's forward", size=_VLLM_RUN, estimated=True)
        return [copy, run] if machine.cuda else [copy]
    if not isinstance(config.engine, MiniEngineConfig):
        return []
    parts: list[Part] = []
    if isinstance(config.trainer, FSDPTrainerConfig):
        note = "a whole model to decode from"
        parts.append(Part(name="engine's weights", size=size * shape.parameters, note=note))
    elif config.model.lora_rank:
        note = "linear layers with adapters merged"
        parts.append(Part(name="engine's weights", size=size * shape.linear, note=note))
    if not machine.cuda:
        packed = _packed(config, machine)
        own = packed * (shape.linear + shape.embedding)
        # A type that the model has not: the embedding cannot be the model's own.
        own += packed * shape.embedding if packed != size else 0
        parts.append(Part(name="packed weights", size=own, note="as the CPU's kernels read them"))
    return parts


def _packed(config: RunConfig, machine: Machine) -> int:
    """Bytes of a packed weight, and of a number in the KV cache of a CPU."""
    return 4 if type_bytes(config) == 4 else machine.packed


def kv_token_bytes(config: RunConfig, shape: ModelShape, machine: Machine) -> int:
    """Keys and values of one token."""
    head, size = shape.head_dim, type_bytes(config)
    if isinstance(config.engine, MiniEngineConfig) and not machine.cuda:
        head, size = -(-head // _COLUMNS) * _COLUMNS, _packed(config, machine)
    return 2 * shape.layers * shape.kv_heads * head * size


def _kv(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    longest: int,
    weights: float,
    copies: float,
) -> tuple[int, Part]:
    """KV budget in tokens, and what it takes.

    Args:
        longest: tokens of the longest response.
        weights: of the trainer.
        copies: of weights that the engine holds, and its forward pass.
    """
    engine, token = config.engine, kv_token_bytes(config, shape, machine)
    if not isinstance(engine, MiniEngineConfig | VllmEngineConfig):
        return 1 << 30, Part(name="KV cache", size=0.0)
    if engine.kv_tokens:
        tokens, note = engine.kv_tokens, f"{engine.kv_tokens:,} tokens: engine.kv_tokens"
        return tokens, Part(name="KV cache", size=tokens * token, note=note)
    whole = type_bytes(config) * shape.parameters
    loaded = whole if isinstance(config.trainer, FSDPTrainerConfig) else weights
    tokens = int(_kv_bytes(config, machine, loaded, copies) / token)
    if shape.context:
        tokens = min(tokens, engine.max_running * shape.context)
    how = "engine.gpu_memory" if _shares(config, machine) else "a quarter of what is free"
    if machine.cuda or isinstance(engine, VllmEngineConfig):
        note = f"{tokens:,} tokens: {how}"
        return tokens, Part(name="KV cache", size=tokens * token, note=note)
    # On a CPU memory is taken as it is first used.
    used = min(tokens, _most_running(engine, config) * longest)
    note = f"{used:,} tokens of {tokens:,}, {how}"
    return tokens, Part(name="KV cache", size=used * token, note=note, estimated=True)


def _most_running(engine: MiniEngineConfig | VllmEngineConfig, config: RunConfig) -> int:
    """Responses that one engine decodes together, when all are on it."""
    rollout = config.rollout
    return min(engine.max_running, rollout.prompts_per_step * rollout.num_generations)


def _shares(config: RunConfig, machine: Machine) -> bool:
    """Whether vLLM takes a share of a GPU."""
    return machine.cuda and isinstance(config.engine, VllmEngineConfig)


def _kv_bytes(config: RunConfig, machine: Machine, loaded: float, copies: float) -> float:
    """Of a budget that is not given, as engines find it when models are loaded."""
    share = machine.device_bytes / machine.on_device
    if machine.cuda and isinstance(config.engine, VllmEngineConfig):
        return max(0.0, config.engine.gpu_memory * share - copies)
    if machine.cuda:
        return max(0.0, share - loaded - copies - _PROCESS[True]) / KV_SHARE
    # On a CPU every worker takes its quarter of what all of them have left.
    free = machine.device_bytes - machine.on_device * (loaded + copies + _PROCESS[False])
    return max(0.0, free) / KV_SHARE


def _work(
    config: RunConfig,
    shape: ModelShape,
    machine: Machine,
    longest: int,
    trainer: float,
    cache: float,
) -> Part:
    """The largest of what is there for a while, one after the other."""
    size, shard = type_bytes(config), config.trainer.members(machine.workers)
    tokens = max(config.train.micro_batch_tokens, longest)
    sharded = isinstance(config.trainer, FSDPTrainerConfig)
    around = gathered(shape, size) if sharded else 0.0
    phases = {
        f"backward of {tokens:,} tokens": around
        + backward(config, shape, tokens, cuda=machine.cuda)
    }
    if (reference := _reference_bytes(config, shape, machine)) and (sharded or machine.cuda):
        asked = forward(config, shape, tokens, cuda=machine.cuda)
        phases["asking the reference"] = around + reference + asked
    if isinstance(config.engine, MiniEngineConfig):
        if machine.cuda:
            phases["decoding"] = decoding(shape, _most_running(config.engine, config), cache)
        else:
            phases["packing the weights"] = 2 * _packed(config, machine) * shape.embedding
    if shard > 1:
        # It is spread a layer at a time; what is trained comes into being in float32.
        whole = size * shape.parameters + 4 * shape.embedding
        phases["loading the whole model"] = max(0.0, whole - trainer)
    name = max(phases, key=lambda each: phases[each])
    return Part(name="working set", size=phases[name], note=name, estimated=True)


def _reference_bytes(config: RunConfig, shape: ModelShape, machine: Machine) -> float:
    """Of the copy of the first weights; adapters are their own difference to them."""
    if config.train.beta == 0 or config.model.lora_rank:
        return 0.0
    sharded = isinstance(config.trainer, FSDPTrainerConfig)
    size = 4 if sharded else type_bytes(config)
    return size * shape.parameters / config.trainer.members(machine.workers)


def _host(
    config: RunConfig, shape: ModelShape, machine: Machine, reference: float
) -> tuple[Part, ...]:
    """What workers on GPUs take of the machine's own memory."""
    count = machine.workers
    loading = count * type_bytes(config) * shape.parameters
    parts = [
        Part(name="processes", size=count * _HOST_PROCESS, estimated=True),
        Part(name="loading", size=loading, note="each worker loads the model", estimated=True),
    ]
    if reference:
        parts.append(Part(name="references", size=count * reference, note="the first weights"))
    return tuple(parts)
