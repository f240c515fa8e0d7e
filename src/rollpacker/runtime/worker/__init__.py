"""What runs inside a worker's process: an engine, a training replica, or both.

A worker knows its driver's messages only: no step, no policy, no other worker.
"""
