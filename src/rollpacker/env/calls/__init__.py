"""Calls of tools: parsed from text, checked against schemas, made.

Nothing here knows episodes.
"""
