"""Traces of jobs, and logs of cluster events, in formats independent of the scheduler."""
