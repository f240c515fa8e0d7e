"""The scheduler with its leases and programs, live and as restored from the store."""
