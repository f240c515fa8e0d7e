"""TRL: vLLM, beside the trainer or as a server, and over how many devices."""

from __future__ import annotations

from rollpacker.cli.convert.layout import spread
from rollpacker.cli.convert.table import Draft, Joint

_SHARE, _SIZE, _MODE = "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_mode"
_WORLD = "num_processes"
_CORRECTION = "vllm_importance_sampling_correction"


def _engine(draft: Draft) -> None:
    if not draft.get("use_vllm", False):
        draft.ignore(
            "use_vllm is off", "use_vllm", *(k for k in draft.given if k.startswith("vllm_"))
        )
        return
    draft.set("engine.kind", "vllm", draft.origin("use_vllm"))
    size = draft.number(_SIZE, 1, 1)
    if size > 1:
        draft.set("engine.tensor_parallel", size, draft.origin(_SIZE))
    if draft.get(_MODE, "colocate") == "server":
        _server(draft, size)
    else:
        _beside(draft, size)
    if _CORRECTION not in draft.given:
        draft.warnings.append(
            "engine.kind: TRL corrects for what vLLM computes differently "
            f"({_CORRECTION}, on by default); here ratios are to vLLM's own log-probabilities"
        )


def _server(draft: Draft, size: int) -> None:
    """GPUs of the server's own; how many the trainer has only the launcher knows."""
    draft.ignore("of a server, which is started on its own", _SHARE)
    world = draft.asked.world
    if world is None:
        draft.refuse(
            "the server has GPUs of its own: set devices.layout=separate, devices.training to the "
            "trainer's (--world does) and devices.per_node to all",
            _MODE,
        )
        return
    why = f"{draft.origin(_MODE)}, --world {world}"
    draft.set("devices.layout", "separate", why)
    draft.set("devices.training", world, why)
    draft.set("devices.per_node", world + size, f"{why}: and one engine; more of them decode more")


def _beside(draft: Draft, size: int) -> None:
    """Each process trains and decodes."""
    if draft.get("vllm_enable_sleep_mode", False):
        draft.ignore("freed while TRL trains; engine.gpu_memory is kept: left at 0.4", _SHARE)
    else:
        draft.set("engine.gpu_memory", draft.get(_SHARE, 0.3), draft.origin(_SHARE, 0.3))
    if size > 1:
        spread(draft, size, size, 0, f"{draft.origin(_SIZE)}: a replica holds whole engines")


def _devices(draft: Draft) -> None:
    """As the launcher knew them: of accelerate's own configuration the file says nothing."""
    on_cpu = draft.get("use_cpu", False)
    draft.set("devices.kind", "cpu" if on_cpu else "cuda", draft.origin("use_cpu", False))
    world = draft.asked.world or draft.number(_WORLD, 0, 0)
    if world and draft.get("num_machines", 1) == 1 and "devices.per_node" not in draft.settings:
        why = f"--world {world}" if draft.asked.world else draft.origin(_WORLD)
        draft.set("devices.per_node", world, why)
    if world != 1 and "trainer.kind" not in draft.settings:
        draft.warnings.append(
            "trainer.kind: each device has a whole replica; what accelerate's configuration says "
            "of ZeRO or FSDP is not in this file: where it spread the model, set trainer.kind=fsdp"
        )


JOINTS = (
    Joint(("use_vllm", _SHARE, _SIZE, _MODE), _engine),
    Joint(("use_cpu", _WORLD), _devices),
)
"""The devices after the engine."""
