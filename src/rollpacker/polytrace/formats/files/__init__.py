"""Records out of files: lines, tables, packed or not, with the place of every mistake.

Nothing here knows what a record means.
"""
