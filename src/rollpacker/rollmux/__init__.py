"""RollMux: many RL jobs on a shared rollout pool and a shared training pool.

The rooms above ``service`` and ``node`` are pure; nothing in them knows what a job computes.
"""
