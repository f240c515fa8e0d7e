"""Child processes and the frames that they are sent.

Nothing here knows what children are for.
"""
