"""Policies to compare with: jobs on nodes of their own, and simple rules for sharing.

Nothing here is used by the daemon.
"""
