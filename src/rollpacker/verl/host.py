"""The undocumented parts of verl that are used, checked at import. All other imports of this
package from verl are public. A release with other parameters is refused, as a run with it would
silently go wrong, or hang."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from packaging.version import Version
from verl import __version__ as release  # pyright: ignore
from verl.trainer.ppo.v1 import (  # pyright: ignore[reportMissingImports]
    AgentLoopManagerTQ,
    AgentLoopWorkerTQ,
    PPOTrainerSync,
)
from verl.workers.rollout.llm_server import (  # pyright: ignore[reportMissingImports]
    LLMServerClient,
    LLMServerManager,
)

TESTED = ("0.9.1", "0.10.0.dev0")
"""Oldest and newest version of verl: the release in the tests, and a commit of its main branch that
was tried by hand (docs/verl.md)."""


def _undecorated(actor: Any) -> type:
    """The class below ``@ray.remote``, which itself cannot be subclassed."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__


PlainWorker: Any = _undecorated(AgentLoopWorkerTQ)
PlainManager: Any = AgentLoopManagerTQ
PlainTrainer: Any = PPOTrainerSync
PlainClient: Any = LLMServerClient

_LEFT_OUT = ("self", "_ray_trace_ctx")  # parameters that Python and Ray add

Seams = Mapping[tuple[Any, str], tuple[str, ...]]

SEAMS: Seams = {
    (PlainWorker, "_run_prompt"): ("prompt sampling_params trajectory trace",),
    (PlainWorker, "_run_agent_loop"): ("sampling_params trajectory agent_name trace kwargs",),
    (PlainWorker, "_compute_score"): ("outputs kwargs",),
    (PlainManager, "_init_agent_loop_workers"): ("",),
    (PlainManager, "generate_sequences"): ("prompts",),
    (PlainTrainer, "_build_replay_buffer"): ("",),
    (PlainTrainer, "_fetch_one_gen_batch"): ("",),
    (PlainTrainer, "_submit_batch_to_rollout"): ("batch",),
    (PlainTrainer, "_save_checkpoint"): ("",),
    (PlainTrainer, "_load_checkpoint"): ("",),
    (PlainTrainer, "get_llm_client"): ("",),
    (PlainTrainer, "fit"): ("agent_loop_manager",),
    (PlainTrainer, "step"): ("metrics timing_raw",),
    (PlainTrainer, "prepare_step"): ("",),
    (PlainTrainer, "on_sample_begin"): ("",),
    (PlainTrainer, "on_step_end"): ("",),
    # Parameters of 0.10.0.dev, and of 0.9.1, whose balancers may take more.
    (PlainClient, "_acquire_server"): ("request_id", "request_id extra"),
    (LLMServerManager, "get_client"): ("client_cls kwargs",),
}
"""Methods that are overridden or called, with their allowed parameters. Those with ``_`` are
private."""


def changes(seams: Seams) -> list[str]:
    """Differences from these methods, one text each."""
    found: list[str] = []
    for (owner, name), expected in seams.items():
        method = getattr(owner, name, None)
        if method is None:
            found.append(f"{owner.__name__} has no {name}")
            continue
        names = [n for n in inspect.signature(method).parameters if n not in _LEFT_OUT]
        if " ".join(names) not in expected:
            found.append(f"{owner.__name__}.{name}({', '.join(names)}) has other parameters")
    return found


def check_release(version: str, changed: list[str]) -> None:
    """Raise ``ImportError`` for a verl version that these classes cannot extend."""
    oldest, newest = map(Version, TESTED)
    given = Version(version)
    if oldest <= given <= newest and not changed:
        return
    lacks = f": {', '.join(changed)}" if changed else ""
    raise ImportError(
        f"rollpacker.verl works with verl {TESTED[0]} to {TESTED[1]}, not with {version}{lacks}"
    )


check_release(release, changes(SEAMS))
