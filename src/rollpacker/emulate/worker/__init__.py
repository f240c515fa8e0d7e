"""Emulated workers: they are told what real ones are told, and report the same.

Nothing here knows the driver's policy.
"""
