"""The driver's view of all workers: which there are, who listens, who has died.

Nothing here knows steps or policies.
"""
