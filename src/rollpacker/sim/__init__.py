"""The simulated driver: a heap of timed events and cost models under the real policies.

The policies are those of real runs; nothing here has a copy of them.
"""
