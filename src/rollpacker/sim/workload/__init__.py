"""What a simulated job samples: prompts, lengths, turns.

Nothing here knows how long it takes.
"""
