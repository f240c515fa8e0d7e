"""Which columns of a row make a prompt.

Nothing here reads files.
"""
