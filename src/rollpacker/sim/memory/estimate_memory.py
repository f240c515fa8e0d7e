"""How much memory a job takes, by arithmetic on its model's shape: nothing is loaded.

Weights, sums, optimizer state and caches are what is allocated; what a forward and backward keep,
and what a process takes before it holds anything, are estimates.
"""

from __future__ import annotations

from rollpacker.config import RunConfig, longest_response
from rollpacker.policy.engines.device_split import divide, turns
from rollpacker.sim.costs.models import ModelShape
from rollpacker.sim.memory.engine_memory import decoding_phases, engine_parts
from rollpacker.sim.memory.graders import graders
from rollpacker.sim.memory.needs import PROCESS, JobMachine, MemoryNeeds, Part, Placed
from rollpacker.sim.memory.working_set import backward, forward, gathered

_HOST_PROCESS = 2.0e9
"""Of a process on CUDA, in the machine's own memory."""
_ASLEEP = 1.5e9
"""What vLLM keeps on a device while it sleeps, besides its process."""
_ENVIRONMENTS_PROCESS = 0.2e9
"""Of a process of environments, without what they hold themselves."""


def needs(config: RunConfig, shape: ModelShape, machine: JobMachine) -> MemoryNeeds:
    """The memory of a job on a machine.

    Raises ``ValueError`` where its longest response is not known, or devices do not divide.
    """
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
    """KV tokens of an engine; what each device holds, or each that decodes; each that trains."""
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
    """The copy through which engines in processes of their own get new weights."""
    if not job.division.apart:
        return ()
    return (Part(name="weights for the engines", size=job.model_bytes, note="/dev/shm"),)


def _processes(job: Placed, count: int) -> Part:
    name, note = ("process", "") if count == 1 else ("processes", f"{count} of them")
    size = count * PROCESS[job.machine.cuda]
    return Part(name=name, size=size, note=note, estimated=True)


def _largest(phases: dict[str, float]) -> tuple[Part, ...]:
    """The largest of what is there for a while, one after the other."""
    if not phases:
        return ()
    name = max(phases, key=lambda each: phases[each])
    return (Part(name="working set", size=phases[name], note=name, estimated=True),)


def _trainer(job: Placed) -> list[Part]:
    """What stays: weights first."""
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
    """What a replica takes for a while besides the bytes that it holds, by what it does."""
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
    """Of the copy of the first weights; adapters are their own difference to them."""
    if job.config.train.beta == 0 or job.config.model.lora_rank:
        return 0.0
    size = 4 if job.sharded else job.type_bytes
    return size * job.shape.parameters / job.division.replica


def _host(job: Placed) -> tuple[Part, ...]:
    """What processes on GPUs take at most of a machine's own memory."""
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
