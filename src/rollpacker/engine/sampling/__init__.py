"""Draws tokens from logits, the same way in numpy and torch."""
