"""The scheduler with its leases and programs, live and as it is read from the log again.

Nothing here knows HTTP.
"""
