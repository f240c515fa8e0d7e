"""Perform the policies' decisions in simulated time."""
