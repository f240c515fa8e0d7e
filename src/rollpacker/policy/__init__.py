"""Decisions of one RL job: pure state machines, without clock, I/O or randomness of their own."""
