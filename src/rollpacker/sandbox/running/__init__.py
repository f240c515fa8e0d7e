"""One execution of an untrusted program, from outside.

Nothing here knows tests.
"""
