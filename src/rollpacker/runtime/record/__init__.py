"""What a run leaves behind, and what its user sees of it meanwhile.

Nothing here starts, stops or decides anything.
"""
