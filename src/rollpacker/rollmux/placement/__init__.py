"""Decides which jobs may share which nodes, and at which cost. It never changes the cluster."""
