"""Tail batching inside verl: its synchronous trainer, with rounds of ours.

``VERL_USE_EXTERNAL_MODULES=rollpacker.verl`` makes the trainer known by name, and two settings
choose it::

    trainer.v1.trainer_mode=rollpacker
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollpacker.verl.AgentLoopManager

Options are in a section of their own, ``+rollpacker.tail_batching.mode=race`` for one. What runs
with which of verl's classes, and what has never run, is in ``docs/verl.md``.
"""

from rollpacker.verl.manager import AgentLoopManager
from rollpacker.verl.trainer import TailBatchingTrainer

__all__ = ["AgentLoopManager", "TailBatchingTrainer"]
