"""Which engines the devices make, at which size, and where a tail goes.

Nothing here knows prompts or rewards.
"""
