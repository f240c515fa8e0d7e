"""Bytes between two processes, and signs of life."""
