"""Synthetic workloads: their parameters, fitted and drawn.

Nothing here knows formats.
"""
