"""Prompts, lengths and turns that a simulated job samples."""
