"""The vocabulary: types, events, decisions, policies and their journal.

It knows no other package.
"""
