"""Decisions of one RL job: pure state machines.

No clock, no I/O, no randomness of their own; nothing here knows what drives it.
"""
