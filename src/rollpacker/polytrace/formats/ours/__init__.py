"""Formats of our own: traces, journals, run folders.

Nothing here knows what is done with a trace.
"""
