"""A job while it runs: steps, evaluations, checkpoints, signals, losses of workers."""
