"""What is known of response lengths, and what racing does to them.

Nothing here decides about a round.
"""
