"""Grading in processes that may die.

Nothing here knows what a reward function does.
"""
