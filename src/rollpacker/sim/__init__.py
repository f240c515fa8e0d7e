"""The simulated driver: a heap of timed events and cost models under the policies of real runs."""
