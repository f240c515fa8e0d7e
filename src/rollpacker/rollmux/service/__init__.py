"""RollMux on real machines: what a job, a node and the daemon run."""
