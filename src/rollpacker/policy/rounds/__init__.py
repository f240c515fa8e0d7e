"""Tail batching: which prompts a round starts, which responses count, and which prompts wait."""
