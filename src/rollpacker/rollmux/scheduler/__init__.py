"""The scheduler: events in, decisions out.

No clock, no I/O: the daemon and the simulation drive it.
"""
