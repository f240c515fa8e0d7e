"""verl: which engine samples, and which devices decode and train."""

from __future__ import annotations

from rollpacker.cli.convert.layout import spread
from rollpacker.cli.convert.table import Draft, Joint
from rollpacker.cli.convert.verl_rules import ACTOR, ROLLOUT

_NAME, _MOST = f"{ROLLOUT}name", f"{ROLLOUT}max_num_seqs"
_SHARE = (f"{ROLLOUT}gpu_memory_utilization", f"{ROLLOUT}free_cache_engine")
_SIZE = f"{ROLLOUT}tensor_model_parallel_size"
_GPUS, _NODES = "trainer.n_gpus_per_node", "trainer.nnodes"
_DEVICE = "trainer.device"
_RECOMPUTED = "algorithm.rollout_correction.bypass_mode"
_SHARD = f"{ACTOR}fsdp_config.fsdp_size"


def _engine(draft: Draft) -> None:
    name = draft.get(_NAME)
    if name is not None:
        kind = "mini" if name == "hf" else "vllm"
        other = "" if name == "vllm" else f": no such engine here, '{kind}' samples the same"
        draft.set("engine.kind", kind, draft.origin(_NAME) + other)
        if kind == "vllm" and not draft.get(_RECOMPUTED, False):
            draft.warnings.append(
                "engine.kind: verl computes old log-probabilities anew with the actor; here ratios "
                "are to vLLM's own, unless rollout.top_p or top_k cut its softmax"
            )
    if name == "vllm" and draft.get(_SHARE[1], True) is False and draft.get(_SHARE[0]):
        draft.set("engine.gpu_memory", draft.get(_SHARE[0]), draft.origin(_SHARE[0]))
    else:
        draft.ignore(
            "verl frees this memory while it trains; engine.gpu_memory is kept all the time: "
            "left at 0.4",
            *_SHARE,
        )
    if name == "hf":
        draft.ignore("of vLLM", _MOST)
    elif draft.get(_MOST):
        draft.set("engine.max_running", draft.get(_MOST), draft.origin(_MOST))


def _devices(draft: Draft) -> None:
    """Those of one node: what is on more of them is said to be missing."""
    device = draft.get(_DEVICE, "cuda")
    if device in ("cuda", "cpu"):
        draft.set("devices.kind", device, draft.origin(_DEVICE, "cuda"))
    else:
        draft.refuse("devices are GPUs by CUDA, or CPUs", _DEVICE)
    if draft.get(_NODES, 1) != 1:
        draft.refuse("a run has one machine", _NODES)
    gpus = draft.number(_GPUS, 0, 0)
    if gpus:
        draft.set("devices.per_node", gpus, draft.origin(_GPUS))
    usual = 1 if gpus == 1 else 2
    size = draft.number(_SIZE, usual, 1)
    if draft.get(_NAME) in (None, "hf"):
        draft.ignore("of vLLM", _SIZE)
        size = 1
    elif gpus % size:
        draft.warnings.append(
            f"engine.tensor_parallel: {gpus} GPUs do not divide into engines of {size}; left at 1"
        )
        draft.refuse("GPUs do not divide so", _SIZE)
        size = 1
    else:
        draft.set("engine.tensor_parallel", size, draft.origin(_SIZE, usual))
    shard = draft.number(_SHARD, -1)
    if gpus == 1 or (size == 1 and shard < 1):
        draft.ignore("each device has a whole replica: trainer.kind=fsdp spreads them", _SHARD)
        return
    why = draft.origin(_SHARD, -1) + (": all devices share a replica" if shard < 1 else "")
    spread(draft, max(shard, 0), size, gpus, why)


JOINTS = (
    Joint((_NAME, *_SHARE, _MOST), _engine),
    Joint((_SIZE, _GPUS, _NODES, _DEVICE, _SHARD), _devices),
)
"""The devices after the engine."""
