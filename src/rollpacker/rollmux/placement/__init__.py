"""Which jobs may share which nodes, and what that costs.

Nothing here changes the cluster.
"""
