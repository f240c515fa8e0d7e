"""Predict a job's memory on a machine, by arithmetic on its model's shape.

Activations are counted as transformers' layers save them, logits and the head's gradient as in
``train/model/token_logprobs.py``. Allocators round up, and kernels have workspaces of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollpacker.config import (
    FSDPTrainerConfig,
    MiniEngineConfig,
    RewardConfig,
    RunConfig,
    VllmEngineConfig,
    longest_response,
)
from rollpacker.config.rollout import KV_SHARE
from rollpacker.policy.engines.device_split import Division, divide, turns
from rollpacker.sim.costs.layers_of_config import DecoderLayer
from rollpacker.sim.costs.models import ModelShape, find_model

PROCESS = {True: 1.0e9, False: 0.7e9}
"""On CUDA: context, libraries' workspaces, NCCL. On a CPU: libraries and compiled kernels."""
_ROOMY = 0.9  # A job that takes a larger share of a device is tight


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMachine:
    """The machines of a job.

    Args:
        cuda: whether ``devices`` are GPUs. Otherwise the machine's own memory is the one device.
        workers: the job's devices on all ``nodes``, as its configuration counts them. Several may
            share a GPU, and all share a CPU.
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
    nodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A job on a machine. ``longest``: tokens of the longest response."""

    config: RunConfig
    shape: ModelShape
    machine: JobMachine
    division: Division
    longest: int

    @property
    def type_bytes(self) -> int:
        return 2 if self.config.model.dtype == "bfloat16" else 4

    @property
    def model_bytes(self) -> float:
        return float(self.type_bytes * self.shape.held)

    @property
    def sharded(self) -> bool:
        return isinstance(self.config.trainer, FSDPTrainerConfig)

    @property
    def separate(self) -> bool:
        return self.config.devices.layout == "separate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Memory in bytes. ``note`` describes it."""

    name: str
    size: float
    note: str = ""
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """Memory that a job takes.

    Args:
        worker: on each device. With ``layout: separate`` on each that decodes.
        trainer: with ``layout: separate`` on each device that trains.
        shared: once on the first device, for grading. On a CPU also memory that all processes
            share.
        host: of the own memory of each machine, if devices are GPUs.
        shared_weights: the engines' copy of the weights in shared memory or in a file, in bytes. It
            is part of ``host``, or of ``shared`` on a CPU.
    """

    machine: JobMachine
    division: Division
    worker: tuple[Part, ...]
    trainer: tuple[Part, ...]
    shared: tuple[Part, ...]
    host: tuple[Part, ...]
    shared_weights: float
    kv_tokens: int
    longest: int

    @property
    def worker_bytes(self) -> float:
        return sum(part.size for part in self.worker)

    @property
    def trainer_bytes(self) -> float:
        return sum(part.size for part in self.trainer)

    @property
    def total(self) -> float:
        machine = self.machine
        shared = sum(part.size for part in self.shared)
        return max(
            self._held(start) + (shared if start == 0 else 0.0)
            for start in range(0, machine.workers, machine.on_device)
        )

    def _held(self, start: int) -> float:
        machine = self.machine
        here = min(machine.on_device, machine.workers - start)
        decoding = min(here, max(0, self.division.decoding - start))
        return decoding * self.worker_bytes + (here - decoding) * self.trainer_bytes

    @property
    def sequences(self) -> int:
        """Responses of full length that the KV budget holds. Each prompt counts one token."""
        return self.kv_tokens // self.longest if self.kv_tokens > self.longest else 0

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, and the engine can decode at least one response."""
        return self.total <= self.machine.device_bytes and self.sequences > 0

    @property
    def tight(self) -> bool:
        """Whether it fits so narrowly that estimates and fragments matter."""
        return self.fits and self.total > _ROOMY * self.machine.device_bytes


# --- Models that grade

_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
_STREAMED = 3  # layers of a judge that are on a GPU at least: one that stays, two that are streamed

Held = list[tuple[str, float]]


def graders(config: RunConfig, *, cuda: bool) -> tuple[Held, Held]:
    """Return memory of graders on the first GPU and on the host. Each grading process has all of
    it. A judge on a GPU streams its layers from host memory. Its minimum is counted, or 0 if its
    size is unknown."""
    device: Held = []
    host: Held = []
    for reward in config.rewards:
        found = _model(reward)
        if found is None:
            continue
        name, size, on_cuda = found
        try:
            shape = find_model(name)
        except ValueError:
            host.append((f"{name} (size not known)", 0.0))
            continue
        workers = config.grading.workers
        label = f"{workers} x {name}" if workers > 1 else name
        host.append((label, workers * size * shape.parameters))
        if cuda and on_cuda:
            device.append((label, workers * size * _resident(shape)))
    return device, host


def _model(reward: RewardConfig) -> tuple[str, int, bool] | None:
    options: dict[str, Any] = reward.options
    if reward.function == "judge":
        if not options.get("model"):
            return None
        size = _SIZES.get(str(options.get("dtype", "auto")), 4)
        return str(options["model"]), size, options.get("device", "auto") != "cpu"
    folder = Path(reward.function).expanduser()
    if ":" in reward.function or not (folder / "config.json").is_file():
        return None
    size = _SIZES.get(str(options.get("dtype", "float32")), 4)
    return str(folder), size, str(options.get("device", "cpu")).startswith("cuda")


def _resident(shape: ModelShape) -> int:
    return shape.ends + min(shape.layers, _STREAMED) * shape.largest_layer


# --- A forward and backward pass over one micro-batch

LOGITS = 1 << 25  # logits that ``train/model/token_logprobs.py`` holds at a time
_LOGIT_BYTES = 12  # log-probabilities, probabilities and their gradient, in float32

_DRAW_BYTES = 36
"""Logits, scaled ones and log-probabilities in float32, and three more arrays in float64."""


def _size(config: RunConfig) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


def layer_token_bytes(
    config: RunConfig, shape: ModelShape, layer: DecoderLayer, *, cuda: bool
) -> float:
    """Return the bytes that one layer saves per token for the backward pass."""
    size, hidden, inner = _size(config), shape.hidden, layer.inner
    # Inputs of two norms, in float32 and scaled; of the gated MLP what its products are made of.
    kept = size * (2 * hidden + 3 * inner) + 8 * hidden
    # Each expert has an input and an output of its own.
    kept += size * 2 * hidden * layer.routed
    rank, adapted = config.model.lora_rank, shape.adapted(layer)
    if rank and size == 2:
        # Adapters are float32: each of them has a cast input of its own.
        kept += 4 * sum(columns for _, columns in adapted)
        kept += size * (hidden + inner) if shape.count.experts else 0
    else:
        kept += size * (2 * hidden + layer.output + inner)
    # Attention is computed in float32 on a CPU.
    attention = (size if cuda else 4) * layer.mixed
    return kept + attention + 4 * layer.normed + len(adapted) * 4 * rank


def activations(config: RunConfig, shape: ModelShape, tokens: int, *, cuda: bool) -> float:
    """Return the bytes of all layers, or with checkpointing of their inputs and one layer."""
    each = {b: layer_token_bytes(config, shape, b, cuda=cuda) for b in {*shape.blocks}}
    ends = (2 * _size(config) + 4) * shape.hidden * tokens
    if not config.train.gradient_checkpointing:
        return sum(each[block] for block in shape.blocks) * tokens + ends
    inputs = shape.layers * _size(config) * shape.hidden * tokens
    return inputs + max(each.values()) * tokens + ends


def backward(config: RunConfig, shape: ModelShape, tokens: int, *, cuda: bool) -> float:
    """Return the peak: the loss is computed and no memory is freed yet."""
    saved = activations(config, shape, tokens, cuda=cuda)
    return saved + _logits(config, shape, tokens) + _head(config, shape, tokens)


def forward(config: RunConfig, shape: ModelShape, tokens: int, *, cuda: bool) -> float:
    """Return the peak without gradients: one layer's activations, and logits."""
    layer = max(layer_token_bytes(config, shape, each, cuda=cuda) for each in {*shape.blocks})
    return layer * tokens + _logits(config, shape, tokens)


def gathered(shape: ModelShape, size: int) -> float:
    """Return whole weights and gradients that a process of a sharded replica holds at once.
    Embedding and head stay until the backward pass ends. Layers are gathered one ahead.
    Gradients are added up in float32."""
    ends, layer = shape.ends, shape.largest_layer
    return size * (ends + 2 * layer) + 4 * max(ends, layer)


def decoding(shape: ModelShape, running: int, cache: float) -> float:
    """Return the memory of a decode step of the built-in engine on a GPU. ``running`` responses
    fill ``cache`` bytes. Attention repeats a layer's keys and values for all heads."""
    layer = cache / shape.layers * (1 + shape.heads / max(1, shape.kv_heads))
    return layer + drawing(shape, running)


def drawing(shape: ModelShape, running: int) -> float:
    """Return the memory to sample the next tokens of ``running`` responses, in float64."""
    return _DRAW_BYTES * running * shape.vocabulary


def _logits(config: RunConfig, shape: ModelShape, tokens: int) -> float:
    rows = min(tokens, max(1, LOGITS // shape.vocabulary))
    narrow = 2 if _size(config) == 2 else 0
    return (_LOGIT_BYTES + narrow) * rows * shape.vocabulary


def _head(config: RunConfig, shape: ModelShape, tokens: int) -> float:
    if config.model.lora_rank:
        return 0.0
    narrow = 2 if _size(config) == 2 else 0
    several = 4 if tokens * shape.vocabulary > LOGITS else 0
    return (4 + narrow + several) * shape.embedding


# --- Engines: weights of their own and KV caches

_VLLM_RUN = 1.5e9
"""Memory that vLLM reserves for its own forward pass, within ``engine.gpu_memory``."""
_COLUMNS = 32  # the engine for CPUs pads a head to a multiple of it


def engine_parts(job: Placed, trained: float) -> tuple[int, Part, list[Part]]:
    """Return an engine's KV budget in tokens, its memory on a device, and all engines' parts
    there. ``trained``: bytes of the trainer's weights."""
    base, *larger = job.division.sizes
    parts = _weights(job, base)
    tokens, kv = _kv(job, base, trained, sum(part.size for part in parts))
    resting = (_resting(job, size, trained) for size in larger)
    return tokens, kv, [*parts, kv, *_draws(job), *resting]


def _draws(job: Placed) -> list[Part]:
    engine = job.config.engine
    if not isinstance(engine, VllmEngineConfig):
        return []
    running = _most_running(job, engine)
    note = f"the next tokens of {running:,} responses"
    size = drawing(job.shape, running)
    return [Part(name="engine's draws", size=size, note=note, estimated=True)]


def _resting(job: Placed, devices: int, trained: float) -> Part:
    """A part of an engine of more devices, which sleeps until the planner joins them."""
    held = sum(part.size for part in _weights(job, devices))
    _, kv = _kv(job, devices, trained, held)
    note = f"1/{devices} of the weights, a KV cache"
    name = f"engine of {devices}, idle"
    return Part(name=name, size=held + kv.size, note=note, estimated=True)


def _weights(job: Placed, devices: int) -> list[Part]:
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
    return 4 if job.type_bytes == 4 else job.machine.packed


def _kv_token_bytes(job: Placed, devices: int) -> float:
    """Bytes of one token, on each of the devices that share the heads. Memory per sequence
    (windows, states) is divided among the tokens of a full-length response."""
    values = job.shape.cached(devices, job.longest)
    each = (values.token + values.sequence / job.longest) / devices
    if not isinstance(job.config.engine, MiniEngineConfig) or job.machine.cuda:
        return each * job.type_bytes
    width = job.shape.blocks[0].kv_width // 2
    padded = -(-width // _COLUMNS) * _COLUMNS / width if width else 1.0
    return each * padded * _packed(job)


def _kv(job: Placed, devices: int, trained: float, held: float) -> tuple[int, Part]:
    """KV budget of an engine in tokens, and its bytes on each device. ``trained``: bytes of the
    trainer's weights. ``held``: of the engine's own, and its forward pass."""
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
    rollout = job.config.rollout
    return min(engine.max_running, rollout.prompts_per_step * rollout.num_generations)


def _kv_bytes(job: Placed, trained: float, held: float) -> float:
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
    """Return the temporary memory of the built-in engine by phase, with ``cache`` bytes of KV."""
    engine = job.config.engine
    if not isinstance(engine, MiniEngineConfig):
        return {}
    if job.machine.cuda:
        return {"decoding": decoding(job.shape, _most_running(job, engine), cache)}
    return {"packing the weights": 2 * _packed(job) * job.shape.embedding}


# --- The whole job

_HOST_PROCESS = 2.0e9
_ASLEEP = 1.5e9  # memory that vLLM keeps on a device while it sleeps, besides its process
_ENVIRONMENTS_PROCESS = 0.2e9


def needs(config: RunConfig, shape: ModelShape, machine: JobMachine) -> MemoryNeeds:
    """Return the memory of a job on a machine. Raises ``ValueError`` if its longest response is
    unknown, or if devices do not divide."""
    cap = config.rollout.max_completion_length or shape.context
    longest = longest_response(config.environment, cap or 0)
    if not longest:
        raise ValueError(
            f"rollout.max_completion_length is not set, and the context of {config.model.path} is "
            "not known without its config.json: set rollout.max_completion_length, such as 4096"
        )
    division = divide(config, machine.workers, shape.heads, shape.kv_heads, machine.nodes)
    job = Placed(config=config, shape=shape, machine=machine, division=division, longest=longest)
    tokens, worker, trainer = _on_devices(job)
    on_device, on_host = graders(config, cuda=machine.cuda)
    shared = tuple(Part(name=name, size=size, estimated=True) for name, size in on_device)
    graded = (Part(name=name, size=size, estimated=True) for name, size in on_host)
    beside = (*_shared_weights(job), *graded, *_environments(job))
    return MemoryNeeds(
        machine=machine,
        division=division,
        worker=worker,
        trainer=trainer,
        shared=shared if machine.cuda else (*shared, *beside),
        host=(*_host(job), *beside) if machine.cuda else (),
        shared_weights=sum(part.size for part in _shared_weights(job)),
        kv_tokens=tokens,
        longest=longest,
    )


def _environments(job: Placed) -> tuple[Part, ...]:
    environment = job.config.environment
    if environment is None:
        return ()
    size = environment.processes * _ENVIRONMENTS_PROCESS
    note = f"{environment.processes} x environment.processes, without what they hold"
    return (Part(name="environments", size=size, note=note, estimated=True),)


def _on_devices(job: Placed) -> tuple[int, tuple[Part, ...], tuple[Part, ...]]:
    trainer = _trainer(job)
    held = sum(part.size for part in trainer)
    tokens, cache, engine = engine_parts(job, trainer[0].size)
    training, decoding = _training_phases(job, held), decoding_phases(job, cache.size)
    reference = _reference_bytes(job)
    if reference and not job.machine.cuda:
        trainer.append(Part(name="reference", size=reference, note="the first weights"))
    engines = len(job.division.sizes)
    if job.separate:
        return (
            tokens,
            (*engine, *_largest(decoding), _processes(job, engines)),
            (*trainer, *_largest(training), _processes(job, 1)),
        )
    processes = _processes(job, 1 + engines if job.division.apart else 1)
    taken = turns(job.config, gpus=job.machine.cuda)
    if taken != "off":
        asleep = Part(name="engine, asleep", size=_ASLEEP, note="its graphs", estimated=True)
        stays = [] if taken == "both" else trainer
        phases = (
            (*stays, *engine, *_largest(decoding), processes),
            (*trainer, asleep, *_largest(training), processes),
        )
        return tokens, max(phases, key=lambda phase: sum(part.size for part in phase)), ()
    return tokens, (*trainer, *engine, *_largest(training | decoding), processes), ()


def _shared_weights(job: Placed) -> tuple[Part, ...]:
    if not job.division.apart:
        return ()
    return (Part(name="weights for the engines", size=job.model_bytes, note="/dev/shm"),)


def _processes(job: Placed, count: int) -> Part:
    name, note = ("process", "") if count == 1 else ("processes", f"{count} of them")
    size = count * PROCESS[job.machine.cuda]
    return Part(name=name, size=size, note=note, estimated=True)


def _largest(phases: dict[str, float]) -> tuple[Part, ...]:
    if not phases:
        return ()
    name = max(phases, key=lambda each: phases[each])
    return (Part(name="working set", size=phases[name], note=name, estimated=True),)


def _trainer(job: Placed) -> list[Part]:
    config, count, shard = job.config, job.shape.parameters, job.division.replica
    share = f", 1/{shard} of them" if shard > 1 else ""
    rank = config.model.lora_rank
    parts: list[Part] = []
    if rank:
        trained = job.shape.adapter_parameters(rank)
        note = f"{config.model.dtype}, frozen{share}"
        parts.append(Part(name="weights", size=job.model_bytes / shard, note=note))
        parts.append(
            Part(name="adapters", size=4 * trained / shard, note=f"rank {rank}, float32{share}")
        )
    else:
        trained = count
        kept = 4 if job.sharded else job.type_bytes
        note = f"{'float32' if kept == 4 else config.model.dtype}{share}"
        size = kept * count + job.model_bytes - job.type_bytes * count  # frozen: as they came
        parts.append(Part(name="weights", size=size / shard, note=note))
        if kept < 4:
            parts.append(Part(name="masters", size=4 * count, note="the weights in float32"))
    parts.append(Part(name="gradient sums", size=4 * trained / shard, note=f"float32{share}"))
    parts.append(Part(name="AdamW moments", size=8 * trained / shard, note=f"float32{share}"))
    return parts


def _training_phases(job: Placed, held: float) -> dict[str, float]:
    config, shape, cuda = job.config, job.shape, job.machine.cuda
    tokens = max(config.train.micro_batch_tokens, job.longest)
    around = gathered(shape, job.type_bytes) if job.sharded else 0.0
    phases = {f"backward of {tokens:,} tokens": around + backward(config, shape, tokens, cuda=cuda)}
    if (reference := _reference_bytes(job)) and (job.sharded or cuda):
        asked = forward(config, shape, tokens, cuda=cuda)
        phases["asking the reference"] = around + reference + asked
    if job.division.replica > 1:
        # It is spread a layer at a time; what is trained comes into being in float32.
        whole = job.model_bytes + 4 * shape.embedding
        phases["loading the whole model"] = max(0.0, whole - held)
    return phases


def _reference_bytes(job: Placed) -> float:
    """The copy of the first weights. Adapters need none, since they are the difference."""
    if job.config.train.beta == 0 or job.config.model.lora_rank:
        return 0.0
    size = 4 if job.sharded else job.type_bytes
    return size * job.shape.parameters / job.division.replica


def _host(job: Placed) -> tuple[Part, ...]:
    division, here = job.division, job.machine.workers // job.machine.nodes
    decoding, training = min(division.decoding, here), min(division.training, here)
    # vLLM begins without weights.
    engines = decoding if division.apart and job.config.engine.kind == "mini" else 0
    loading = (training + engines) * job.model_bytes
    processes = training + decoding * len(division.sizes) if division.apart else decoding
    parts = [
        Part(name="processes", size=processes * _HOST_PROCESS, estimated=True),
        Part(name="loading", size=loading, note="trainers load the model", estimated=True),
    ]
    if turns(job.config, gpus=True) == "both":
        size = training * sum(part.size for part in _trainer(job))
        parts.append(Part(name="trainers", size=size, note="their state while engines decode"))
    if reference := _reference_bytes(job):
        size = training * reference
        parts.append(Part(name="references", size=size, note="the first weights"))
    return tuple(parts)
