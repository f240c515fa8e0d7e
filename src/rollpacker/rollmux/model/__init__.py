"""What the cluster scheduler thinks in: jobs, nodes, groups, events and decisions.

Nothing here decides.
"""
