"""When gradients start, on which devices, and how new weights get to the engines.

Nothing here knows losses.
"""
