"""Formats of our own: traces, journals, run folders."""
