"""A step or an evaluation: decisions become messages, what workers report becomes events.

Nothing here decides, and nothing here writes files of a run.
"""
