"""The trainer's state on its device and on disk: optimizer, reference, checkpoints."""
