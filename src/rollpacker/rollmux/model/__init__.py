"""The vocabulary of the cluster scheduler: jobs, nodes, groups, events and decisions."""
