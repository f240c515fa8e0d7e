"""RollMux: many RL jobs on shared rollout and training pools. Only service and node do I/O."""
