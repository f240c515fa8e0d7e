"""Traces of jobs and logs of what a cluster did, and an independent check of the latter.

The check knows nothing of the scheduler.
"""
