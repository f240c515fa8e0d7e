"""Tail batching inside verl: its synchronous trainer, with rollpacker's rounds.

``VERL_USE_EXTERNAL_MODULES=rollpacker.verl`` registers the trainer, and two settings choose it::

    trainer.v1.trainer_mode=rollpacker
    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollpacker.verl.AgentLoopManager

Options have their own section, such as ``+rollpacker.tail_batching.mode=race``. ``docs/verl.md``
lists the tested combinations with verl's classes.
"""

from rollpacker.verl.manager import AgentLoopManager
from rollpacker.verl.trainer import TailBatchingTrainer

__all__ = ["AgentLoopManager", "TailBatchingTrainer"]
