"""The RollMux daemon: drives the scheduler with HTTP requests, keeps what it said on disk."""
