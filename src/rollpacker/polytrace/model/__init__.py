"""Parameters of synthetic workloads, fitted and drawn."""
