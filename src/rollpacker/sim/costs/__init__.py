"""Durations of work on each machine."""
