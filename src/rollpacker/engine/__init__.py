"""Engines: what turns prompts and weights into sampled tokens."""
