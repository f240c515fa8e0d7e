"""What a real run's files tell of time, and the run again in the simulator.

Nothing here knows the paper's jobs.
"""
