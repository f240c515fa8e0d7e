"""What a trainer keeps and writes: optimizer, reference, checkpoints.

Nothing here knows where gradients come from.
"""
