"""The RollMux daemon: serves the scheduler over HTTP and keeps its decisions on disk."""
