"""What each mode of tail batching would gain on somebody's own lengths.

It simulates with the world's parts, and has none of its own.
"""
