"""Tail batching inside TRL: ``from rollpacker.trl import GRPOTrainer`` instead of TRL's own."""

from rollpacker.trl.trainer import GRPOTrainer

__all__ = ["GRPOTrainer"]
