"""A workload trace's steps again: on a real engine, timed, or in the simulator.

It trains nothing.
"""
