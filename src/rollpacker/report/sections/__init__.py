"""Parts of a run's report, one a file."""
