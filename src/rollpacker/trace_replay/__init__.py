"""Replay a workload trace's steps on a real engine, timed, or in the simulator, without
training."""
