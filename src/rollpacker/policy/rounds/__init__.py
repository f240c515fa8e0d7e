"""Tail batching: what a round starts, which responses count, what waits for a long round.

Nothing here knows how engines are laid out.
"""
