"""The formats of the published PolyTrace suite.

Nothing here knows other formats.
"""
