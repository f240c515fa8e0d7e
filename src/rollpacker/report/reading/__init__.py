"""What a run left behind, read.

Nothing here draws.
"""
