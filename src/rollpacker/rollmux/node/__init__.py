"""Processes on a cluster's nodes: an agent each, and a keeper beside each program of a job."""
