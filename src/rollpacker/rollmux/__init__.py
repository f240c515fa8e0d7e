"""RollMux: many RL jobs on a shared rollout pool and a shared training pool."""
