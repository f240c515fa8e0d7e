"""The RollMux daemon: drives the scheduler with HTTP requests, keeps what it said on disk.

It decides nothing about jobs by itself.
"""
