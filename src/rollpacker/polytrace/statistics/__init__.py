"""Statistics of response lengths.

Nothing here knows formats or models.
"""
