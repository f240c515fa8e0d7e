"""What runs on a cluster's nodes: an agent each, and a keeper beside each program of a job.

Nothing here places, plans or forecasts.
"""
