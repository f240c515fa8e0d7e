"""Environments in processes that may die.

Nothing here knows what an environment does.
"""
