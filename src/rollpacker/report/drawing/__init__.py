"""Plots and pages from plain data.

Nothing here reads files of a run.
"""
