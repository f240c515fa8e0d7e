"""One step: the policy's decisions become messages, what workers report becomes its events.

Nothing here decides, and nothing here writes files of a run.
"""
