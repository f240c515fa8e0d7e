"""The driver's view of all workers: their processes, reports and deaths."""
