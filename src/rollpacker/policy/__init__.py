"""Decisions of one RL job: pure state machines."""
