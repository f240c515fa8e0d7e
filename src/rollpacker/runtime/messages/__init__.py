"""What drivers and workers say to each other, and the weights that they share.

Nothing here knows how a message travels, or what a worker makes of it.
"""
