"""Read times from a real run's files, and repeat the run in the simulator."""
