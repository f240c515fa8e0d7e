"""The state for users, scripts and Prometheus. Views change nothing."""
