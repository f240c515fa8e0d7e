"""A job while it runs: steps, evaluations, checkpoints, signals, losses.

It decides when, never what a step does: that is the policy's.
"""
