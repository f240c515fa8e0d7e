"""Bytes between two processes, and whether the other one lives.

Nothing here knows what the bytes mean.
"""
