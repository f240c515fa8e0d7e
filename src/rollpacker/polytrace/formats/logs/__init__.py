"""Logs of trainers: a table of their keys, and one reader of all of them.

Nothing here knows what is done with a trace.
"""
