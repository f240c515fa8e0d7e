"""The daemon as jobs, nodes and commands see it.

Nothing here knows the daemon's inside.
"""
