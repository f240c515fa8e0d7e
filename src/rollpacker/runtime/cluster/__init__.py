"""The machines of a run, and how its workers get there.

Nothing here knows what workers are for.
"""
