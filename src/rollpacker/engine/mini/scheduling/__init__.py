"""Which sequences run in a step, and which KV blocks they have.

Nothing here touches weights.
"""
