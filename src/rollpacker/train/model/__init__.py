"""The model: loaded, run forward, and what it asks of those who sample from it.

Nothing here knows rewards or replicas.
"""
