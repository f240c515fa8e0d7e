"""Tail batching inside TRL: ``from rollpacker.trl import GRPOTrainer`` replaces TRL's own."""

try:
    from rollpacker.trl.trainer import GRPOTrainer
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    text = "rollpacker.trl needs TRL 1.0 to 1.16: pip install 'trl>=1.0,<2'"
    raise ModuleNotFoundError(text, name="trl") from None

__all__ = ["GRPOTrainer"]
