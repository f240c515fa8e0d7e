"""The real driver: processes, clocks, files.

It decides nothing: that is the policy's.
"""
